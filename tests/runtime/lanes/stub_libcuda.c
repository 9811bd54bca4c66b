/* A CUDA driver whose one device has the computer's own memory, or that of the simulated device: what KvikIO asks of a
   driver to move "device memory" to a file and back. Everything happens at once, so streams and events have nothing to
   do. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 };
enum { DEVICE_MEMORY = 2 };

static int something; /* what all handles point to */

int cuDriverGetVersion(int *version) { *version = 12000; return SUCCESS; }
int cuGetErrorName(int error, const char **text) { *text = "STUB"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stub"; return SUCCESS; }

int cuPointerGetAttribute(void *value, int attribute, Address address) {
  switch (attribute) {
    case CONTEXT: *(void **)value = &something; return SUCCESS;
    case MEMORY_TYPE: *(unsigned *)value = DEVICE_MEMORY; return SUCCESS;
    case DEVICE_POINTER: *(Address *)value = address; return SUCCESS;
    case DEVICE_ORDINAL: *(int *)value = 0; return SUCCESS;
  }
  return INVALID_VALUE;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **values, Address address) {
  for (unsigned i = 0; i < count; ++i)
    if (cuPointerGetAttribute(values[i], attributes[i], address)) return INVALID_VALUE;
  return SUCCESS;
}

int cuMemGetAddressRange_v2(Address *base, size_t *size, Address address) {
  *base = address;
  *size = (size_t)1 << 40;
  return SUCCESS;
}

/* Memory that the host can access; all other memory is the device's. KvikIO pins few buffers, and unpins them at exit. */
static struct { char *begin, *end; } pinned[256];
static atomic_int pinned_count;

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
  int number = atomic_fetch_add(&pinned_count, 1);
  if (number >= 256) return OUT_OF_MEMORY;
  pinned[number].begin = memory;
  pinned[number].end = (char *)memory + size;
  return SUCCESS;
}

int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
  return posix_memalign(memory, 4096, size) ? OUT_OF_MEMORY : cuMemHostRegister_v2(*memory, size, flags);
}

int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }

static int is_pinned(Address address) {
  for (int i = 0; i < pinned_count && i < 256; ++i)
    if ((char *)address >= pinned[i].begin && (char *)address < pinned[i].end) return 1;
  return 0;
}

/* A function of the simulated device (tests/simulated/device.cpp), whose memory the host cannot access. NULL without it. */
static void *simulated(const char *name) {
  const char *path = getenv("SIMULATED_DEVICE");
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
  return library ? dlsym(library, name) : NULL;
}

int cuMemcpyAsync(Address to, Address from, size_t size, void *stream) {
  void (*peek)(const void *, void *, size_t) = simulated("simulated_peek");
  void (*poke)(void *, const void *, size_t) = simulated("simulated_poke");
  if (!peek)
    memcpy((void *)to, (void *)from, size);
  else if (is_pinned(to))
    peek((void *)from, (void *)to, size);
  else
    poke((void *)to, (void *)from, size);
  return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) {
  return cuMemcpyAsync(to, (Address)from, size, stream);
}

int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) {
  return cuMemcpyAsync((Address)to, from, size, stream);
}

#define GIVES_A_HANDLE(name) int name(void **handle) { *handle = &something; return SUCCESS; }
GIVES_A_HANDLE(cuCtxGetCurrent)
GIVES_A_HANDLE(cuCtxPopCurrent_v2)
GIVES_A_HANDLE(cuDevicePrimaryCtxRetain)
GIVES_A_HANDLE(cuEventCreate)
GIVES_A_HANDLE(cuStreamCreate)

#define DOES_NOTHING(name) int name(void) { return SUCCESS; }
DOES_NOTHING(cuCtxPushCurrent_v2)
DOES_NOTHING(cuDevicePrimaryCtxRelease_v2)
DOES_NOTHING(cuEventDestroy_v2)
DOES_NOTHING(cuEventQuery)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventSynchronize)
DOES_NOTHING(cuMemHostUnregister)
DOES_NOTHING(cuStreamDestroy_v2)
DOES_NOTHING(cuStreamSynchronize)

#define REFUSES(name) int name(void) { return NOT_INITIALIZED; }
REFUSES(cuCtxCreate_v2)
REFUSES(cuCtxCreate_v4)
REFUSES(cuCtxDestroy_v2)
REFUSES(cuCtxGetDevice)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetAttribute)
REFUSES(cuDeviceGetCount)
REFUSES(cuInit)
REFUSES(cuLaunchHostFunc)
