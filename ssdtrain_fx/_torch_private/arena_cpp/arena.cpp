// Memory for compiled steps on a CPU.
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
// * A block is free as soon as its last tensor dies. It may be freed on any thread.
// * Freed memory stays mapped, so the next step touches no fresh pages. Memory above the blocks that no step has used for
//   a while goes back to the system; `trim` returns the holes between blocks too.
// * A forked child inherits the blocks that are in use, and the huge pages that they lie on. It frees none of them and
//   makes an arena of its own when it needs one.
// * If the system grants no memory, the allocation goes to the allocator that torch had before.

#include <pthread.h>

#include <mutex>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "range.h"

namespace {

using ssdtrain::Layout;
using ssdtrain::Range;
using ssdtrain::settings;

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

struct Thread {
  bool is_inside = false;
  bool runs_graph = false;
  Layout::Site next;
};

thread_local Thread thread;

// The deleter of all blocks, and of what `raw_allocate` has returned, which may come from the previous allocator.
void free_any(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(lock());
    bool is_block = current != nullptr && current->contains(pointer);
    if (is_block)
      current->free(pointer);
    for (const Range* range : inherited())
      is_block = is_block || range->holds(pointer);
    if (!is_block) {
      previous->raw_deleter()(pointer);
      return;
    }
  }
  c10::profiledCPUMemoryReporter().Delete(pointer);
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
  Layout::Site site = thread.next;
  ++thread.next.number;
  return current->allocate(bytes, site);
}

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (thread.is_inside && bytes >= settings.min_bytes) {
      void* memory = allocate_block(bytes);
      if (memory != nullptr) {
        c10::profiledCPUMemoryReporter().New(memory, bytes);
        return {memory, memory, &free_any, c10::Device(c10::DeviceType::CPU)};
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
  thread.next = {};
  lock().unlock();
}

}  // namespace

extern "C" {

// Makes torch ask this arena first. Returns whether it does. `bytes` of addresses are reserved for it.
bool ssdtrain_arena_install(size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  if (allocator == nullptr) {
    reserve_bytes = ssdtrain::round_up(bytes, ssdtrain::HUGE_PAGE_BYTES);
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

// The allocations of this thread come from the arena. Returns whether they did before. `graph` is the number of the
// compiled graph that runs; 0 if none does.
bool ssdtrain_arena_enter(int64_t graph) {
  bool was_inside = thread.is_inside;
  thread.is_inside = true;
  thread.next = {};
  thread.runs_graph = graph != 0;
  std::lock_guard<std::mutex> guard(lock());
  if (graph != 0 && current != nullptr)
    thread.next = current->begin_run(graph);
  return was_inside;
}

bool ssdtrain_arena_is_inside() {
  return thread.is_inside;
}

// Ends what `enter` began, and restores what it returned. If a graph runs within another one, the layout of the outer
// one ends here.
void ssdtrain_arena_leave(bool was_inside) {
  bool ran_graph = thread.runs_graph;
  thread = {was_inside, false, {}};
  std::lock_guard<std::mutex> guard(lock());
  if (ran_graph && current != nullptr)
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
