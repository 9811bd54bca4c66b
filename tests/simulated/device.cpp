// A simulated accelerator behind torch's CUDA dispatch key, for tests. Built on torch 2.13; it uses torch's C++ internals
// (guards, hooks, boxed fallbacks), all of which are in this file. With PRIVATE_USE, it is behind PrivateUse1, the key of
// accelerators that torch does not know.
//
// It is asynchronous as a GPU is, and hostile where a GPU would only be unlucky:
//
//   streams    one thread each, first in, first out, with random delays; a test can hold one
//   memory     one memfd per device, mapped twice: tensors point to a mapping that nobody may access, and only the
//              threads of the streams use the other one, the shadow
//   allocator  a freed block is reused at once by its stream, last in, first out, and filled with 0xCB in stream order,
//              unless record_stream has named other streams: then it is reused once these have passed the point
//   kernels    the CPU kernel of the same operator, over the shadow memory. Results are allocated beforehand, with the
//              shapes that the operator has on the meta device
//   host       asynchronous copies need registered host memory; other copies block, and are counted
//
// Nothing is destroyed at exit: threads may still run.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

using c10::DeviceIndex;
using c10::IValue;
using at::Tensor;

#ifdef PRIVATE_USE
#define KEY PrivateUse1
constexpr auto kType = c10::kPrivateUse1;
#else
#define KEY CUDA
constexpr auto kType = c10::kCUDA;
#endif
constexpr int kDevices = 2;
constexpr size_t kArenaBytes = size_t(8) << 30;  // addresses; memory is taken when it is touched
constexpr int kPoison = 0xCB;

// ---- a point in the work of a stream ---------------------------------------------------------------------------------

struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool passed = false;
  DeviceIndex device = 0;
  std::chrono::steady_clock::time_point when;
  int64_t at_ns = 0;  // on the clock of its stream: see "paced time"

  void pass() {
    std::lock_guard lock(mutex);
    passed = true;
    when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  bool query() {
    std::lock_guard lock(mutex);
    return passed;
  }
  void wait() {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, std::chrono::seconds(120), [&] { return passed; })) {
      fprintf(stderr, "simulated device: a thread has waited for a stream for 120 s\n");
      abort();
    }
  }
};
using PointPtr = std::shared_ptr<Point>;

struct Settings {
  std::atomic<uint64_t> seed{0};
  std::atomic<int> default_us{0}, side_us{0}, percent{0}, hold_limit_ms{20000};
};
Settings settings;

// ---- counts ----------------------------------------------------------------------------------------------------------

std::mutex counts_mutex;
std::map<std::pair<long, std::string>, int64_t> syncs;  // by thread and kind
std::map<std::string, int64_t> kernels;                 // by operator

void count_sync(const char* kind) {
  std::lock_guard lock(counts_mutex);
  syncs[{syscall(SYS_gettid), kind}]++;
}

void count_kernel(const std::string& name) {
  std::lock_guard lock(counts_mutex);
  kernels[name]++;
}

// ---- streams ---------------------------------------------------------------------------------------------------------

struct Device;

std::atomic<int64_t> tasks_done{0};

struct Stream {
  Device& device;
  const int64_t id;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<bool, std::function<void()>>> tasks;  // whether it is work, which may be late and may fail
  bool held = false, fails_next = false, busy = false;
  PointPtr awaited;

  bool started = false;  // with its first task, so that a process can fork before
  int64_t clock_ns = 0;  // only tasks of the stream use it: see "paced time"
  std::atomic<int64_t> paced{0}, paced_done{0}, latest_ns{0};
  std::vector<int64_t> paced_ends_ns;  // with the mutex

  Stream(Device& device, int64_t id) : device(device), id(id) {}
  void put(bool is_work, std::function<void()> task);
  PointPtr record();
  void wait_for(PointPtr point) {
    put(false, [this, point] {
      await(point);
      point->wait();
      await(nullptr);
      clock_ns = std::max(clock_ns, point->at_ns);
    });
  }
  void await(PointPtr point) {
    std::lock_guard lock(mutex);
    awaited = std::move(point);
  }
  bool rests() {  // nothing happens here before something happens elsewhere
    std::lock_guard lock(mutex);
    if (awaited) return !awaited->query();
    return !busy && (held || tasks.empty());
  }
  [[noreturn]] void run();
};

struct Block {
  DeviceIndex device;
  char* data;
  size_t size, used_bytes;
  int64_t stream;
  std::set<int64_t> others;       // streams that record_stream has named
  std::vector<PointPtr> pending;  // where they were when the block was freed
};

struct Device {
  DeviceIndex index = 0;
  char *base = nullptr, *shadow = nullptr;
  std::mutex mutex;
  std::deque<std::unique_ptr<Stream>> streams;
  std::string failure;  // the first error of a kernel; everything after it is skipped

  std::mutex memory_mutex;
  size_t top = 0, limit = kArenaBytes, allocated = 0, peak = 0;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free_blocks;
  std::vector<Block*> pending;
  std::map<char*, Block*> used;
  int64_t generator_seed = 0, generator_offset = 0;

  Stream& stream(int64_t id) {
    std::lock_guard lock(mutex);
    TORCH_CHECK(id >= 0 && id < int64_t(streams.size()), "simulated device: no stream ", id);
    return *streams[id];
  }
  int64_t new_stream() {
    std::lock_guard lock(mutex);
    streams.push_back(std::make_unique<Stream>(*this, streams.size()));
    return streams.size() - 1;
  }
  void fail(const std::string& why) {
    std::lock_guard lock(mutex);
    if (failure.empty()) failure = why;
  }
  bool failed() {
    std::lock_guard lock(mutex);
    return !failure.empty();
  }
  void check() {
    std::lock_guard lock(mutex);
    if (!failure.empty())
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "simulated device: " + failure);
  }
};

Device* devices() {
  static Device* all = [] {
    auto* made = new Device[kDevices];
    for (int index = 0; index < kDevices; ++index) {
      Device& device = made[index];
      device.index = index;
      int file = memfd_create("simulated-device", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "simulated device: no memory file");
      auto map = [&](int protection) {
        return static_cast<char*>(mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0));
      };
      device.base = map(PROT_NONE);
      device.shadow = map(PROT_READ | PROT_WRITE);
      TORCH_CHECK(device.base != MAP_FAILED && device.shadow != MAP_FAILED, "simulated device: no addresses");
      close(file);
      device.new_stream();  // the default stream
    }
    return made;
  }();
  return all;
}

bool is_here(const Tensor& tensor) { return tensor.device().type() == kType; }

char* shadow_of(const void* address) {
  for (int index = 0; index < kDevices; ++index) {
    Device& device = devices()[index];
    size_t offset = static_cast<const char*>(address) - device.base;
    if (offset < kArenaBytes) return device.shadow + offset;
  }
  TORCH_CHECK(address == nullptr, "simulated device: ", address, " is no device memory");
  return nullptr;
}

void Stream::put(bool is_work, std::function<void()> task) {
  std::lock_guard lock(mutex);
  if (is_work && fails_next) {
    fails_next = false;
    task = [this] { device.fail("device-side assert triggered"); };
  }
  tasks.emplace_back(is_work, std::move(task));
  if (!started) {
    started = true;
    std::thread([this] { run(); }).detach();
  }
  changed.notify_all();
}

PointPtr Stream::record() {
  auto point = std::make_shared<Point>();
  point->device = device.index;
  put(false, [this, point] {
    point->at_ns = clock_ns;
    point->pass();
  });
  return point;
}

void Stream::run() {
  at::set_num_threads(1);
  at::AutoDispatchBelowAutograd below_autograd;
  std::mt19937_64 random(id * 2 + device.index);
  uint64_t seed = 0;
  for (;;) {
    std::pair<bool, std::function<void()>> task;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !tasks.empty(); });
      auto limit = std::chrono::milliseconds(settings.hold_limit_ms);
      if (!changed.wait_for(lock, limit, [&] { return !held; })) {
        fprintf(stderr, "simulated device: stream %ld was held for too long and goes on\n", long(id));
        held = false;
        device.fail("a stream was held for too long");
      }
      task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
    }
    if (task.first) {
      if (seed != settings.seed) {
        seed = settings.seed;
        random.seed(seed * 1000 + id * 2 + device.index);
      }
      int delay_us = id == 0 ? settings.default_us : settings.side_us;
      if (delay_us && int(random() % 100) < settings.percent) usleep(random() % delay_us);
    }
    try {
      if (!task.first || !device.failed()) task.second();
    } catch (const c10::Error& error) {
      device.fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      device.fail(error.what());
    }
    task.second = nullptr;
    std::lock_guard lock(mutex);
    busy = false;
    tasks_done++;
  }
}

// ---- what is current for a thread ------------------------------------------------------------------------------------

thread_local DeviceIndex this_device = 0;
thread_local int64_t current_streams[kDevices] = {};

Stream& current_stream(DeviceIndex index) {
  return devices()[index].stream(current_streams[index]);
}

void synchronize(Stream& stream, const char* kind) {
  count_sync(kind);
  stream.record()->wait();
  stream.device.check();
}

// ---- memory ----------------------------------------------------------------------------------------------------------

void recycle(Device& device, Block* block) {  // with memory_mutex
  char* target = shadow_of(block->data);
  size_t size = block->size;
  device.stream(block->stream).put(false, [target, size] { memset(target, kPoison, size); });
  block->others.clear();
  block->pending.clear();
  device.free_blocks[{block->stream, size}].push_back(block);
}

void recycle_pending(Device& device) {
  auto& pending = device.pending;
  for (size_t i = 0; i < pending.size();) {
    Block* block = pending[i];
    auto& points = block->pending;
    if (std::all_of(points.begin(), points.end(), [](auto& point) { return point->query(); })) {
      pending.erase(pending.begin() + i);
      recycle(device, block);
    } else {
      ++i;
    }
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Device& device = devices()[block->device];
  std::lock_guard lock(device.memory_mutex);
  device.allocated -= block->size;
  device.used.erase(block->data);
  if (block->others.empty()) return recycle(device, block);
  for (int64_t other : block->others) block->pending.push_back(device.stream(other).record());
  device.pending.push_back(block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device where(kType, this_device);
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    Device& device = devices()[this_device];
    size_t size = (nbytes + 511) / 512 * 512;
    int64_t stream = current_streams[this_device];
    std::lock_guard lock(device.memory_mutex);
    recycle_pending(device);
    Block* block = take(device, stream, size);
    device.allocated += block->size;
    device.peak = std::max(device.peak, device.allocated);
    device.used[block->data] = block;
    return {block->data, block, &free_block, where};
  }
  Block* take(Device& device, int64_t stream, size_t size) {
    auto found = device.free_blocks.find({stream, size});
    if (found != device.free_blocks.end() && !found->second.empty()) {
      Block* block = found->second.back();
      found->second.pop_back();
      return block;
    }
    if (device.allocated + size > device.limit || device.top + size > kArenaBytes)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "Simulated device: out of memory: tried to allocate ", size,
                       " bytes; ", device.allocated, " of ", device.limit, " are in use.");
    auto* block = new Block{device.index, device.base + device.top, size, size, stream, {}, {}};
    memset(shadow_of(block->data), kPoison, size);
    device.top += size;
    return block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t count) const override {
    char *to = shadow_of(target), *from = shadow_of(source);
    current_stream(this_device).put(true, [=] { memcpy(to, from, count); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Device& device = devices()[index];
    std::lock_guard lock(device.memory_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = device.allocated;
    stats.allocated_bytes[0].peak = device.peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    Device& device = devices()[index];
    std::lock_guard lock(device.memory_mutex);
    device.peak = device.allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    Device& device = devices()[index];
    std::lock_guard lock(device.memory_mutex);
    return {device.limit - device.allocated, device.limit};
  }
};
DeviceAllocator device_allocator;

struct DeviceScope {
  DeviceIndex before = this_device;
  explicit DeviceScope(DeviceIndex index) { this_device = index; }
  ~DeviceScope() { this_device = before; }
};

// Host memory that copies may access asynchronously.
std::mutex pinned_mutex;
std::map<char*, size_t> pinned;

bool is_pinned(const void* address) {
  std::lock_guard lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == pinned.begin()) return false;
  auto& [start, length] = *std::prev(after);
  return static_cast<const char*>(address) < start + length;
}

bool pinning_refused = false;
constexpr size_t kMisaligned = 64;

void unpin(void* data) {
  {
    std::lock_guard lock(pinned_mutex);
    pinned.erase(static_cast<char*>(data));
  }
  free(static_cast<char*>(data) - kMisaligned);
}

// Memory is freed at once, also if copies still need it, and begins on no page.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    TORCH_CHECK(!pinning_refused, "simulated device: no memory can be pinned");
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 4096, kMisaligned + nbytes + 1) == 0);
    char* data = static_cast<char*>(memory) + kMisaligned;
    memset(data, kPoison, nbytes);  // what was there before may be what a test expects
    std::lock_guard lock(pinned_mutex);
    pinned[data] = nbytes;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t count) const override { default_copy_data(target, source, count); }
};
PinnedAllocator pinned_allocator;

// ---- torch's view of the device --------------------------------------------------------------------------------------

struct Event {
  PointPtr point;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    if (device.index() >= 0) this_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kType, this_device}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  static c10::Stream wrap(DeviceIndex index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  static DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? this_device : device.index(); }
  static Stream& unwrap(const c10::Stream& stream) { return devices()[stream.device_index()].stream(stream.id()); }
  c10::Stream getStream(c10::Device device) const override {
    return wrap(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return wrap(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return wrap(index_of(device), devices()[index_of(device)].new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->point = unwrap(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && static_cast<Event*>(event)->point) unwrap(stream).wait_for(static_cast<Event*>(event)->point);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    PointPtr point = static_cast<Event*>(event)->point;
    bool passed = point->query();
    devices()[point->device].check();
    return passed;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    count_sync("event");
    PointPtr point = static_cast<Event*>(event)->point;
    point->wait();
    devices()[point->device].check();
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {  // in milliseconds
    PointPtr begin = static_cast<Event*>(first)->point, end = static_cast<Event*>(second)->point;
    TORCH_CHECK(begin->query() && end->query(), "simulated device: an event has not been reached");
    return std::chrono::duration<double, std::milli>(end->when - begin->when).count();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    bool passed = unwrap(stream).record()->query();
    devices()[stream.device_index()].check();
    return passed;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(unwrap(stream), "stream"); }
  void synchronizeDevice(DeviceIndex index) const override {
    Device& device = devices()[index < 0 ? this_device : index];
    count_sync("device");
    size_t count;
    {
      std::lock_guard lock(device.mutex);
      count = device.streams.size();
    }
    for (size_t id = 0; id < count; ++id) device.stream(id).record()->wait();
    device.check();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Device& device = devices()[stream.device_index()];
    std::lock_guard lock(device.memory_mutex);
    auto found = device.used.find(static_cast<char*>(data.get()));
    if (found != device.used.end() && found->second->stream != stream.id()) found->second->others.insert(stream.id());
  }
};
Guard guard;

void DeviceAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  guard.recordDataPtrOnStream(data, stream);
}

#ifdef PRIVATE_USE
struct PrivateUse1Hooks final : at::PrivateUse1HooksInterface {
#else
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return this_device; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(DeviceIndex index) const override { guard.synchronizeDevice(index); }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { this_device = index; }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return guard.exchangeDevice({kType, index}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// ---- paced time ------------------------------------------------------------------------------------------------------
//
// A stream can take exact times: a test says how long a span of its work takes, and copies to and from registered host
// memory take their bytes by a rate. Such a stream has a clock. A span begins when the clock says so, when the host has
// enqueued it, or when what the stream waits for has happened on the clock of its own stream, whichever is last. The
// stream sleeps until the clock says that the span has ended. So what the threads of this file take does not add up:
// only the host can make a paced device late.

struct CopyRates {
  std::atomic<double> out_bytes_per_ns{0}, in_bytes_per_ns{0};  // 0: copies are not paced
};
CopyRates copy_rates;

int64_t now_ns() {  // the clock of time.perf_counter_ns
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void begin_paced(Stream& stream) {
  stream.put(false, [&stream, put_ns = now_ns()] { stream.clock_ns = std::max(stream.clock_ns, put_ns); });
}

void end_paced(Stream& stream, int64_t duration_ns) {
  stream.paced++;
  stream.put(false, [&stream, duration_ns] {
    stream.clock_ns += duration_ns;
    auto end = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(stream.clock_ns));
    std::this_thread::sleep_until(end);
    stream.latest_ns = std::max<int64_t>(stream.latest_ns, now_ns() - stream.clock_ns);
    stream.paced_done++;
    std::lock_guard lock(stream.mutex);
    stream.paced_ends_ns.push_back(stream.clock_ns);
  });
}

struct PacedCopy {  // what is enqueued during its life is a copy of so many bytes
  Stream& stream;
  int64_t duration_ns = 0;
  PacedCopy(Stream& stream, bool to_device, size_t nbytes) : stream(stream) {
    double rate = to_device ? copy_rates.in_bytes_per_ns : copy_rates.out_bytes_per_ns;
    if (nbytes && rate > 0) duration_ns = nbytes / rate;
    if (duration_ns) begin_paced(stream);
  }
  ~PacedCopy() {
    if (duration_ns) end_paced(stream, duration_ns);
  }
};

// ---- operators -------------------------------------------------------------------------------------------------------

Tensor shadow_tensor(const Tensor& tensor) {  // keeps nothing alive: the order of the stream has to
  TORCH_CHECK(!tensor.is_sparse(), "simulated device: no sparse tensors");
  Tensor shadow = at::from_blob(shadow_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                                at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU));
  shadow._set_conj(tensor.is_conj());
  shadow._set_neg(tensor.is_neg());
  return shadow;
}

Tensor kernel_argument(const Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) return tensor;
  if (is_here(tensor)) return shadow_tensor(tensor);
  TORCH_CHECK(tensor.dim() == 0, name, ": expected all tensors to be on the same device, found another one and ", tensor.device());
  Tensor value = tensor.clone();  // read when the kernel is launched
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())  // a Python number, which does not take part in promotion
    value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return value;
}

Tensor meta_argument(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kMeta);
  int64_t elements = tensor.storage().nbytes() / tensor.itemsize();
  Tensor meta = at::empty({elements}, options).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return meta;
}

template <class Convert>
IValue converted(const IValue& value, c10::Device device, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
    return list;
  }
  return value.isDevice() ? IValue(device) : value;
}

void for_each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  converted(value, c10::kCPU, [&](const Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

Tensor like_meta(const Tensor& meta, c10::Device device) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
}

void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t count = schema.arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  c10::Device device(c10::kCPU);
  for (auto& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!is_here(tensor)) return;
      TORCH_CHECK(device.is_cpu() || device == tensor.device(), name, ": tensors on ", device, " and ", tensor.device());
      device = tensor.device();
    });
  if (device.is_cpu()) device = guard.getDevice();
  DeviceScope scope(device.index());
  count_kernel(name);

  bool only_tensors = true, is_view = false;
  std::vector<int> aliases;  // which argument a result is, or -1
  for (auto& result : schema.returns()) {
    only_tensors &= result.type()->isSubtypeOf(*c10::TensorType::get()) ||
        result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    aliases.push_back(-1);
    if (result.alias_info() == nullptr) continue;
    is_view |= !result.alias_info()->isWrite();
    for (size_t i = 0; i < count; ++i)
      if (const auto* info = schema.arguments()[i].alias_info(); info && info->isWrite() && *info == *result.alias_info())
        aliases.back() = i;
  }

  c10::Stack call;
  for (size_t i = 0; i < count; ++i) {
    call.push_back(converted(arguments[i], c10::kCPU, [&](const Tensor& tensor) {
      return is_view ? tensor : kernel_argument(tensor, name);
    }));
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
      Device& of = devices()[device.index()];  // drawn in the order of the host, whatever the streams do
      uint64_t seed = arguments[i].isGenerator()
          ? at::get_generator_or_default<at::CPUGeneratorImpl>(arguments[i].toGenerator(), at::Generator())->random64()
          : of.generator_seed * 1000003 + of.generator_offset++;
      call.back() = at::make_generator<at::CPUGeneratorImpl>(seed);
    }
  }

  // The shapes of the results.
  std::vector<IValue> results;
  bool has_shapes = only_tensors;
  bool all_given = std::all_of(aliases.begin(), aliases.end(), [](int alias) { return alias >= 0; });
  bool is_out = false;  // without its shape
  if (schema.overload_name().find("out") != std::string::npos)
    for (int alias : aliases)
      is_out |= alias >= 0 && arguments[alias].isTensor() && arguments[alias].toTensor().numel() == 0;
  if (has_shapes && (!all_given || is_out)) {
    c10::Stack meta;
    for (auto& argument : arguments) meta.push_back(converted(argument, c10::kMeta, meta_argument));
    try {
      op.callBoxed(&meta);
    } catch (const std::exception& error) {
      TORCH_CHECK(!is_view && !is_out, "simulated device: no shapes for ", name, ": ", error.what());
      has_shapes = all_given;
      if (getenv("SIMULATED_DEBUG")) fprintf(stderr, "simulated device: %s has no shapes: %s\n", name.c_str(), error.what());
      meta.clear();
    }
    for (size_t i = 0; i < meta.size(); ++i) {
      if (aliases[i] >= 0) {
        Tensor given = arguments[aliases[i]].isTensor() ? arguments[aliases[i]].toTensor() : Tensor();
        if (given.defined() && meta[i].toTensor().sizes() != given.sizes()) {
          given.resize_(meta[i].toTensor().sizes());
          call[aliases[i]] = shadow_tensor(given);
        }
        results.push_back(arguments[aliases[i]]);
      } else if (is_view) {
        const Tensor base = arguments[0].toTensor(), shape = meta[i].toTensor();
        Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
        results.push_back(view);
      } else {
        results.push_back(converted(meta[i], device, [&](const Tensor& tensor) { return like_meta(tensor, device); }));
      }
    }
  }
  if (has_shapes && all_given && results.empty())
    for (int alias : aliases) results.push_back(arguments[alias]);
  torch::jit::drop(*stack, count);
  if (is_view) {
    stack->insert(stack->end(), results.begin(), results.end());
    return;
  }

  Stream& stream = current_stream(device.index());
  if (!has_shapes) {  // the shapes depend on the data, or the result is a number: wait, as a GPU does
    synchronize(stream, name.c_str());
    at::AutoDispatchBelowAutograd below_autograd;
    op.callBoxed(&call);
    for (auto& value : call)
      stack->push_back(converted(value, device, [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        Tensor result = like_meta(tensor, device);
        shadow_tensor(result).copy_(tensor);
        return result;
      }));
    return;
  }
  // These give their `out` another shape for a while, which borrowed memory cannot have.
  if (!aliases.empty() && aliases[0] >= 0 && (name == "aten::mse_loss" || name == "aten::smooth_l1_loss")) {
    call[aliases[0]] = at::empty({0}, call[aliases[0]].toTensor().options());
    aliases[0] = -1;
  }
  std::vector<Tensor> targets;  // where the kernel's own results go
  for (size_t i = 0; i < results.size(); ++i)
    if (aliases[i] < 0) for_each_tensor(results[i], [&](const Tensor& tensor) { targets.push_back(shadow_tensor(tensor)); });
  stream.put(true, [op, call, targets, aliases, name]() mutable {
    try {
      op.callBoxed(&call);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, name, ": ", error.what_without_backtrace());
    }
    size_t next = 0;
    for (size_t i = 0; i < call.size(); ++i)
      if (aliases[i] < 0)
        for_each_tensor(call[i], [&](const Tensor& result) {
          TORCH_CHECK(next < targets.size() && targets[next].sizes() == result.sizes(), name, ": another shape than on meta");
          targets[next++].copy_(result);
        });
  });
  stack->insert(stack->end(), results.begin(), results.end());
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  DeviceScope scope(device && device->index() >= 0 ? device->index() : this_device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::KEY),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  DeviceScope scope(device && device->index() >= 0 ? device->index() : this_device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::KEY),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

void copy_across(const Tensor& target, const Tensor& source) {  // as between two GPUs
  Stream& from = current_stream(source.get_device());
  Stream& to = current_stream(target.get_device());
  from.wait_for(to.record());
  Tensor a = shadow_tensor(target), b = shadow_tensor(source);
  from.put(true, [a, b] { a.copy_(b); });
  to.wait_for(from.record());
}

Tensor& copy(Tensor& target, const Tensor& source, bool non_blocking) {
  if (target.numel() == 0) return target;
  count_kernel("aten::copy_");
  if (is_here(target) && is_here(source) && target.device() != source.device()) {
    copy_across(target, source);
    return target;
  }
  const Tensor& on_device = is_here(target) ? target : source;
  Stream& stream = current_stream(on_device.get_device());
  if (is_here(target) && is_here(source)) {
    stream.put(true, [a = shadow_tensor(target), b = shadow_tensor(source)] { a.copy_(b); });
    return target;
  }
  const Tensor& on_host = is_here(target) ? source : target;
  bool registered = is_pinned(on_host.const_data_ptr());
  bool to_device = is_here(target);
  Tensor device_side = shadow_tensor(on_device), host;
  if (!registered && to_device && non_blocking) {  // the driver reads pageable memory now, and writes later
    synchronize(stream, "copy");
    host = on_host.clone();
  } else {  // the bytes, not the tensor: nobody keeps host memory alive
    host = at::from_blob(const_cast<void*>(on_host.const_data_ptr()), on_host.sizes(), on_host.strides(),
                         at::TensorOptions().dtype(on_host.dtype()));
  }
  PacedCopy paced(stream, to_device, registered && non_blocking ? on_device.nbytes() : 0);
  stream.put(true, [=] {
    TORCH_CHECK(!registered || is_pinned(host.const_data_ptr()), "a copy met host memory that is not registered any more");
    to_device ? device_side.copy_(host) : host.copy_(device_side);
  });
  if (!non_blocking || (!registered && !to_device)) synchronize(stream, "copy");
  return target;
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize(current_stream(self.get_device()), "item");
  return shadow_tensor(self).item();
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() == size) return self;
  tensor->set_sizes_contiguous(size);
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    DeviceScope scope(self.get_device());
    c10::DataPtr grown = device_allocator.allocate(needed);
    if (self.storage().nbytes()) device_allocator.copy_data(grown.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr(std::move(grown));
    self.storage().set_nbytes(needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask.to(at::kBool)};
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  c10::Stack stack{self.to(at::kFloat), bins, min, max};  // a GPU counts integers, the CPU does not
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", ""), &stack);
  return stack[0].toTensor().to(self.scalar_type());
}

void record_stream(Tensor& self, c10::Stream stream) {
  guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// ---- a host access to device memory ----------------------------------------------------------------------------------

struct sigaction previous_action;

void on_fault(int number, siginfo_t* info, void* context) {
  for (int index = 0; index < kDevices; ++index)
    if (size_t(static_cast<char*>(info->si_addr) - devices()[index].base) < kArenaBytes) {
      static const char text[] = "simulated device: the host accessed device memory\n";
      (void)!write(2, text, sizeof text - 1);
    }
  sigaction(SIGSEGV, &previous_action, nullptr);  // the access is repeated, and meets the handler before this one
}

}  // namespace

#ifndef PRIVATE_USE
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::CUDAHooks)
}
#endif

TORCH_LIBRARY_IMPL(_, KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, KEY, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("native_dropout", &native_dropout);
  // These have composite kernels that give other bits than the CPU's, or ask for kernels of their own.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
                           "native_group_norm_backward", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("histc", &histc);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
}

// ---- what tests call -------------------------------------------------------------------------------------------------

extern "C" {

void simulated_install() {
  devices();
#ifdef PRIVATE_USE
  at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks);
#endif
  at::globalContext().lazyInitDevice(kType);
  c10::impl::registerDeviceGuard(kType, &guard);
  c10::SetAllocator(kType, &device_allocator);
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &previous_action);
}

void simulated_configure(uint64_t seed, int default_us, int side_us, int percent, int hold_limit_ms) {
  settings.default_us = default_us;
  settings.side_us = side_us;
  settings.percent = percent;
  settings.hold_limit_ms = hold_limit_ms;
  settings.seed = seed;
}

void simulated_hold(int device, int64_t id, bool held) {
  Stream& stream = devices()[device].stream(id);
  std::lock_guard lock(stream.mutex);
  stream.held = held;
  stream.changed.notify_all();
}

void simulated_fail_next(int device, int64_t id) {
  Stream& stream = devices()[device].stream(id);
  std::lock_guard lock(stream.mutex);
  stream.fails_next = true;
}

// Forget the failure, so that the next test can use the device.
void simulated_repair(int device) {
  std::lock_guard lock(devices()[device].mutex);
  devices()[device].failure.clear();
}

// Return when every stream is idle, held, or waits for another one that is. False: that took too long.
bool simulated_settle() {
  for (int attempt = 0; attempt < 200000; ++attempt) {
    int64_t before = tasks_done;
    bool rests = true;
    for (int index = 0; index < kDevices; ++index) {
      Device& device = devices()[index];
      size_t count;
      {
        std::lock_guard lock(device.mutex);
        count = device.streams.size();
      }
      for (size_t id = 0; id < count; ++id) rests &= device.stream(id).rests();
    }
    if (rests && tasks_done == before) return true;
    usleep(100);
  }
  return false;
}

// Device memory as DMA sees it: now, whatever the streams do.
void simulated_peek(const void* address, void* out, size_t size) { memcpy(out, shadow_of(address), size); }
void simulated_poke(void* address, const void* data, size_t size) { memcpy(shadow_of(address), data, size); }

int simulated_stream_count(int device) {
  std::lock_guard lock(devices()[device].mutex);
  return devices()[device].streams.size();
}

bool simulated_is_pinned(const void* address) { return is_pinned(address); }
void simulated_refuse_pinning(bool refused) { pinning_refused = refused; }

// The errors are CUDA's: invalid value, out of memory, already registered, not registered.
int simulated_host_register(char* address, size_t size) {
  std::lock_guard lock(pinned_mutex);
  if (size == 0 || reinterpret_cast<uintptr_t>(address) % 4096) return 1;
  if (pinning_refused) return 2;
  return pinned.emplace(address, size).second ? 0 : 712;
}

int simulated_host_unregister(char* address) {
  std::lock_guard lock(pinned_mutex);
  return pinned.erase(address) ? 0 : 713;
}

void simulated_memory(int device, int64_t* out) {
  Device& of = devices()[device];
  std::lock_guard lock(of.memory_mutex);
  out[0] = of.allocated, out[1] = of.peak, out[2] = of.top, out[3] = of.limit;
}

void simulated_limit_memory(int device, size_t limit) {
  Device& of = devices()[device];
  std::lock_guard lock(of.memory_mutex);
  of.limit = limit ? limit : kArenaBytes;
  of.peak = of.allocated;
}

void simulated_generator(int device, int64_t* state, bool set) {
  Device& of = devices()[device];
  if (set) of.generator_seed = state[0], of.generator_offset = state[1];
  else state[0] = of.generator_seed, state[1] = of.generator_offset;
}

// What is enqueued between these two takes so long.
void simulated_pace_begin(int device, int64_t id) { begin_paced(devices()[device].stream(id)); }
void simulated_pace_end(int device, int64_t id, int64_t duration_ns) { end_paced(devices()[device].stream(id), duration_ns); }

// Copies to and from registered host memory; 0: as fast as they are.
void simulated_pace_copies(double out_bytes_per_s, double in_bytes_per_s) {
  copy_rates.out_bytes_per_ns = out_bytes_per_s / 1e9, copy_rates.in_bytes_per_ns = in_bytes_per_s / 1e9;
}

// Spans enqueued and over, and by how much the last of them to be late was late.
void simulated_paced(int device, int64_t id, int64_t* out) {
  Stream& stream = devices()[device].stream(id);
  out[0] = stream.paced, out[1] = stream.paced_done, out[2] = stream.latest_ns.exchange(0);
}

// When the spans since the last call ended, by the clock of the stream: at most so many. Returns how many there are.
size_t simulated_paced_ends(int device, int64_t id, int64_t* out, size_t size) {
  Stream& stream = devices()[device].stream(id);
  std::lock_guard lock(stream.mutex);
  size_t count = std::min(size, stream.paced_ends_ns.size());
  std::copy_n(stream.paced_ends_ns.begin(), count, out);
  stream.paced_ends_ns.erase(stream.paced_ends_ns.begin(), stream.paced_ends_ns.begin() + count);
  return count;
}

// The clock of the stream once all that is enqueued is over.
int64_t simulated_clock(int device, int64_t id) {
  PointPtr point = devices()[device].stream(id).record();
  point->wait();
  return point->at_ns;
}

// Lines "sync <thread> <kind> <count>" and "kernel <name> <count>". Returns the length.
size_t simulated_report(char* out, size_t size, bool reset) {
  std::lock_guard lock(counts_mutex);
  std::string text;
  for (auto& [key, value] : syncs)
    text += "sync " + std::to_string(key.first) + " " + key.second + " " + std::to_string(value) + "\n";
  for (auto& [key, value] : kernels) text += "kernel " + key + " " + std::to_string(value) + "\n";
  if (reset) syncs.clear(), kernels.clear();
  size_t length = std::min(size, text.size());
  memcpy(out, text.data(), length);
  return length;
}

}  // extern "C"
