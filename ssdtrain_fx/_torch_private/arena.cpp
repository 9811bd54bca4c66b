// Memory for compiled steps on a CPU: one range of addresses, given out by best fit.
//
// While a thread runs a compiled graph, torch's CPU allocations of that thread come from here. All others go to the
// allocator that torch had before. Built against the headers of the torch that is installed; see arena.py.
//
// Why not the heap of the C library: it keeps freed memory in pieces that later tensors do not fit, or returns it to the
// system, and then every step touches fresh pages. This arena keeps exactly what a step needs, on huge pages.
//
// Guarantees:
//
// * A block has pages of its own and begins on one, so direct I/O can read and write it without edges.
// * A block is free as soon as its last tensor dies, on whatever thread that happens.
// * Freed memory stays mapped, so the next step touches no fresh pages. What no step has used for a while, and what
//   `trim` is asked for, goes back to the system.
// * A forked child inherits the blocks that are in use, and nothing else. It frees none of them and makes an arena of
//   its own when it needs one.
// * If the system grants no memory, the allocation goes to the allocator that torch had before.

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t PAGE_BYTES = 4096;
constexpr size_t HUGE_PAGE_BYTES = size_t{2} << 20;

struct Settings {
  // Smaller tensors are many and short. They would leave holes, and cost more here than on the heap.
  size_t min_bytes = size_t{64} << 10;
  // How long memory stays mapped that no step uses: at least so many runs of graphs, and at least so long. Guesses: a
  // training that is interrupted by an evaluation should find its memory again.
  int64_t unused_runs = 64;
  std::chrono::milliseconds unused_time{10000};
  // For tests: freed memory is filled with 0xCB, so that whoever still reads it computes something else.
  bool poison = false;
};

Settings settings;

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// The state of one arena. Offsets count from its first byte. The caller holds the lock.
//
//   0 ... top           blocks, and free ranges between them
//   top ... committed   free, may be resident
//   committed ... size  reserved addresses only
class Range {
 public:
  bool reserve(size_t size_bytes) {
    size_t asked_bytes = size_bytes + HUGE_PAGE_BYTES;
    void* memory = mmap(nullptr, asked_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
      return false;
    base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(memory), HUGE_PAGE_BYTES));
    size_ = size_bytes;
    madvise(base_, size_, MADV_HUGEPAGE);  // fails on a kernel without huge pages: then small ones serve
    return true;
  }

  bool contains(const void* pointer) const {
    return base_ <= pointer && pointer < base_ + size_;
  }

  bool holds(const void* pointer) const {
    return contains(pointer) && live_.count(static_cast<const char*>(pointer) - base_) != 0;
  }

  // The smallest free range that fits, the lowest of several; else the end.
  void* allocate(size_t bytes) {
    bytes = round_up(bytes, PAGE_BYTES);
    size_t offset;
    auto fitting = free_by_size_.lower_bound({bytes, 0});
    if (fitting != free_by_size_.end()) {
      auto [range_bytes, range_offset] = *fitting;
      erase_free(range_offset, range_bytes);
      offset = range_offset;
      if (range_bytes > bytes)
        insert_free(range_offset + bytes, range_bytes - bytes);
    } else {
      if (!commit(top_ + bytes))
        return nullptr;
      offset = top_;
      top_ += bytes;
      top_peak_ = std::max(top_peak_, top_);
      recent_top_ = std::max(recent_top_, top_);
    }
    live_.emplace(offset, bytes);
    allocated_ += bytes;
    allocated_peak_ = std::max(allocated_peak_, allocated_);
    ++allocations_;
    return base_ + offset;
  }

  void free(void* pointer) {
    size_t offset = static_cast<char*>(pointer) - base_;
    size_t bytes = live_.at(offset);
    live_.erase(offset);
    if (settings.poison)
      std::memset(pointer, 0xCB, bytes);
    allocated_ -= bytes;
    auto after = free_by_offset_.lower_bound(offset);
    if (after != free_by_offset_.end() && after->first == offset + bytes) {
      bytes += after->second;
      after = erase_free(after->first, after->second);
    }
    if (after != free_by_offset_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == offset) {
        offset = before->first;
        bytes += before->second;
        erase_free(before->first, before->second);
      }
    }
    if (offset + bytes == top_)
      top_ = offset;
    else
      insert_free(offset, bytes);
  }

  // A compiled graph has run.
  void end_run() {
    if (++runs_ < settings.unused_runs)
      return;
    auto now = std::chrono::steady_clock::now();
    if (now - since_ < settings.unused_time)
      return;
    decommit(recent_top_);
    recent_top_ = top_;
    runs_ = 0;
    since_ = now;
  }

  // Returns all memory to the system that holds no block.
  void trim() {
    decommit(top_);
    recent_top_ = top_;
    for (auto [offset, bytes] : free_by_offset_)
      madvise(base_ + offset, bytes, MADV_DONTNEED);
  }

  void advise_free(int advice) {
    for (auto [offset, bytes] : free_by_offset_)
      madvise(base_ + offset, bytes, advice);
    if (committed_ > top_)
      madvise(base_ + top_, committed_ - top_, advice);
  }

  void reset_peaks() {
    allocated_peak_ = allocated_;
    committed_peak_ = committed_;
    top_peak_ = top_;
  }

  void describe(int64_t* out) const {
    size_t values[] = {allocated_, allocated_peak_, committed_, committed_peak_, top_peak_, live_.size(), allocations_};
    std::copy(std::begin(values), std::end(values), out);
  }

 private:
  bool commit(size_t end) {
    if (end <= committed_)
      return true;
    size_t wanted = round_up(end, HUGE_PAGE_BYTES);
    if (wanted > size_ || mprotect(base_ + committed_, wanted - committed_, PROT_READ | PROT_WRITE) != 0)
      return false;
    committed_ = wanted;
    committed_peak_ = std::max(committed_peak_, committed_);
    return true;
  }

  void decommit(size_t end) {
    size_t left = round_up(end, HUGE_PAGE_BYTES);
    if (left >= committed_)
      return;
    madvise(base_ + left, committed_ - left, MADV_DONTNEED);
    mprotect(base_ + left, committed_ - left, PROT_NONE);
    committed_ = left;
  }

  std::map<size_t, size_t>::iterator erase_free(size_t offset, size_t bytes) {
    free_by_size_.erase({bytes, offset});
    return free_by_offset_.erase(free_by_offset_.find(offset));
  }

  void insert_free(size_t offset, size_t bytes) {
    free_by_offset_.emplace(offset, bytes);
    free_by_size_.emplace(bytes, offset);
  }

  char* base_ = nullptr;
  size_t size_ = 0;
  size_t top_ = 0;
  size_t committed_ = 0;
  size_t top_peak_ = 0;
  size_t committed_peak_ = 0;
  size_t allocated_ = 0;
  size_t allocated_peak_ = 0;
  size_t allocations_ = 0;
  size_t recent_top_ = 0;
  int64_t runs_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::map<size_t, size_t> free_by_offset_;
  std::set<std::pair<size_t, size_t>> free_by_size_;
  std::unordered_map<size_t, size_t> live_;
};

// Never destroyed: tensors may die after static destructors have run.
std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Range* current = nullptr;
std::vector<Range*>& inherited() {
  static auto* ranges = new std::vector<Range*>;
  return *ranges;
}
c10::Allocator* previous = nullptr;
size_t reserve_bytes = 0;
thread_local bool is_inside = false;

void free_block(void* pointer) {
  c10::profiledCPUMemoryReporter().Delete(pointer);
  std::lock_guard<std::mutex> guard(lock());
  if (current != nullptr && current->contains(pointer))
    current->free(pointer);
}

void free_any(void* pointer) {
  bool ours;
  {
    std::lock_guard<std::mutex> guard(lock());
    ours = current != nullptr && current->contains(pointer);
    for (const Range* range : inherited())
      ours = ours || range->holds(pointer);
  }
  if (ours)
    free_block(pointer);
  else
    previous->raw_deleter()(pointer);
}

void* allocate_block(size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  if (current == nullptr) {
    auto* range = new Range;
    if (!range->reserve(reserve_bytes)) {
      delete range;
      return nullptr;
    }
    current = range;
  }
  return current->allocate(bytes);
}

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (is_inside && bytes >= settings.min_bytes) {
      void* memory = allocate_block(bytes);
      if (memory != nullptr) {
        c10::profiledCPUMemoryReporter().New(memory, bytes);
        return {memory, memory, &free_block, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return previous->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_any;
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
};

ArenaAllocator* allocator = nullptr;

void before_fork() {
  lock().lock();
  if (current != nullptr)
    current->advise_free(MADV_DONTFORK);
}

void after_fork_in_parent() {
  if (current != nullptr)
    current->advise_free(MADV_DOFORK);
  lock().unlock();
}

void after_fork_in_child() {
  if (current != nullptr)
    inherited().push_back(current);
  current = nullptr;
  lock().unlock();
}

}  // namespace

extern "C" {

// Makes torch ask this arena first. Returns whether it does. `bytes` of addresses are reserved for it.
bool ssdtrain_arena_install(size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  if (allocator == nullptr) {
    reserve_bytes = round_up(bytes, HUGE_PAGE_BYTES);
    auto* range = new Range;
    if (!range->reserve(reserve_bytes)) {
      delete range;
      return false;
    }
    current = range;
    previous = c10::GetCPUAllocator();
    allocator = new ArenaAllocator;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  }
  c10::SetCPUAllocator(allocator);
  return c10::GetCPUAllocator() == allocator;
}

void ssdtrain_arena_enter() {
  is_inside = true;
}

bool ssdtrain_arena_is_inside() {
  return is_inside;
}

void ssdtrain_arena_leave() {
  is_inside = false;
  std::lock_guard<std::mutex> guard(lock());
  if (current != nullptr)
    current->end_run();
}

void ssdtrain_arena_trim() {
  std::lock_guard<std::mutex> guard(lock());
  if (current != nullptr)
    current->trim();
}

// For tests: see Settings.
void ssdtrain_arena_configure(size_t min_bytes, int64_t unused_runs, int64_t unused_milliseconds, bool poison) {
  std::lock_guard<std::mutex> guard(lock());
  settings = {min_bytes, unused_runs, std::chrono::milliseconds(unused_milliseconds), poison};
}

void ssdtrain_arena_reset_peaks() {
  std::lock_guard<std::mutex> guard(lock());
  if (current != nullptr)
    current->reset_peaks();
}

// allocated, its peak, committed, its peak, the highest end of a block, blocks in use, allocations so far.
void ssdtrain_arena_describe(int64_t* out) {
  std::lock_guard<std::mutex> guard(lock());
  if (current != nullptr)
    current->describe(out);
}
}
