/* A CUDA driver whose one device has the computer's own memory: what KvikIO asks of a driver to move "device memory" to
   a file and back. Everything happens at once, so streams and events have nothing to do. */
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

int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
  return posix_memalign(memory, 4096, size) ? OUT_OF_MEMORY : SUCCESS;
}

int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }

static int copy(void *to, const void *from, size_t size) { memcpy(to, from, size); return SUCCESS; }
int cuMemcpyAsync(Address to, Address from, size_t size, void *stream) { return copy((void *)to, (void *)from, size); }
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) { return copy((void *)to, from, size); }
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) { return copy(to, (void *)from, size); }

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
DOES_NOTHING(cuMemHostRegister_v2)
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
