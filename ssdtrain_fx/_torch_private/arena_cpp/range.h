// One range of addresses, given out in blocks.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout.h"

namespace ssdtrain {

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

inline Settings settings;

inline size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// The state of one arena. Offsets count from its first byte. The caller holds the lock.
//
//   0 ... top           blocks, and free ranges between them
//   top ... committed   free, may be resident
//   committed ... size  reserved addresses only
//
// Best fit leaves free ranges that nothing fits: in the first steps of a GPT-2 of 4 layers, a fifth of what is in use. Huge
// pages without a block return to the system when much more is resident than was ever needed. So the first steps need
// hardly more memory than later ones.
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

  // Where the layout wants it, if that is free; else by best fit. nullptr if the system grants no memory.
  void* allocate(size_t bytes, Layout::Site site) {
    bytes = round_up(bytes, PAGE_BYTES);
    auto place = layout_.place(site, bytes);
    bool is_placed = place && take(*place, bytes);
    if (!is_placed)
      place = fit(bytes);
    if (!place)
      return nullptr;
    layout_.allocated(site, bytes, is_placed);
    live_[*place] = {bytes, site};
    allocated_ += bytes;
    allocated_peak_ = std::max(allocated_peak_, allocated_);
    ++allocations_;
    touch(*place, *place + bytes);
    return base_ + *place;
  }

  void free(void* pointer) {
    size_t offset = static_cast<char*>(pointer) - base_;
    auto [bytes, site] = live_.at(offset);
    live_.erase(offset);
    layout_.freed(site);
    if (settings.poison)
      std::memset(pointer, 0xCB, bytes);
    allocated_ -= bytes;
    auto after = free_by_offset_.lower_bound(offset);
    if (after != free_by_offset_.end() && after->first == offset + bytes) {
      size_t after_bytes = after->second;
      after = erase_free(after->first, after_bytes);
      bytes += after_bytes;
    }
    if (after != free_by_offset_.begin()) {
      auto before = std::prev(after);
      size_t before_bytes = before->second;
      if (before->first + before_bytes == offset) {
        offset = before->first;
        bytes += before_bytes;
        erase_free(offset, before_bytes);
      }
    }
    if (offset + bytes == top_)
      top_ = offset;
    else
      insert_free(offset, bytes);
  }

  // A compiled graph begins to run. Returns the site of its first allocation; add 1 to `number` for each further one.
  Layout::Site begin_run(int64_t graph) {
    if (settling_runs_ > 0) {
      --settling_runs_;
      decommit(std::max(top_, layout_.end()));
    }
    return layout_.begin_run(graph, allocated_);
  }

  // A compiled graph has run.
  void end_run() {
    if (layout_.end_run()) {
      // Blocks that are in use may lie above the layout, until the step that allocated them has come again.
      settling_runs_ = 2 * layout_.run_count();
      trim();
    }
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
    most_needed_ = 0;
    return_free();
  }

  // Whole huge pages only: advice about a part would break them up.
  void advise_free(int advice) {
    for_free_pages([&](size_t first, size_t end) {
      madvise(base_ + first * HUGE_PAGE_BYTES, (end - first) * HUGE_PAGE_BYTES, advice);
    });
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
  // So much may be resident beside what is needed: a small step whose layout is never known would return it each time,
  // and touch it again. A guess.
  static constexpr size_t SLACK_BYTES = 4 * HUGE_PAGE_BYTES;

  struct Block {
    size_t bytes;
    Layout::Site site;
  };

  // The smallest free range that fits, the lowest of several; else the end.
  std::optional<size_t> fit(size_t bytes) {
    auto fitting = free_by_size_.lower_bound({bytes, 0});
    size_t offset = fitting == free_by_size_.end() ? top_ : fitting->second;
    if (!take(offset, bytes))
      return std::nullopt;
    return offset;
  }

  // Takes [offset, offset + bytes) if all of it is free.
  bool take(size_t offset, size_t bytes) {
    if (offset >= top_) {
      if (!commit(offset + bytes))
        return false;
      if (offset > top_)
        insert_free(top_, offset - top_);
      top_ = offset + bytes;
      top_peak_ = std::max(top_peak_, top_);
      recent_top_ = std::max(recent_top_, top_);
      return true;
    }
    auto range = free_by_offset_.upper_bound(offset);
    if (range == free_by_offset_.begin())
      return false;
    auto [start, length] = *--range;
    if (start + length < offset + bytes)
      return false;
    erase_free(start, length);
    if (start < offset)
      insert_free(start, offset - start);
    if (offset + bytes < start + length)
      insert_free(offset + bytes, start + length - offset - bytes);
    return true;
  }

  // Calls `use(first, end)` for each row of huge pages without a block.
  template <typename Use>
  void for_free_pages(Use use) const {
    auto use_whole = [&](size_t start, size_t end) {
      size_t first = round_up(start, HUGE_PAGE_BYTES) / HUGE_PAGE_BYTES;
      if (first < end / HUGE_PAGE_BYTES)
        use(first, end / HUGE_PAGE_BYTES);
    };
    for (auto [offset, bytes] : free_by_offset_)
      use_whole(offset, offset + bytes);
    use_whole(top_, committed_);
  }

  // A block takes [start, end).
  void touch(size_t start, size_t end) {
    for (size_t page = start / HUGE_PAGE_BYTES; page * HUGE_PAGE_BYTES < end; ++page) {
      resident_pages_ += !is_resident_[page];
      is_resident_[page] = true;
    }
    if (resident_pages_ * HUGE_PAGE_BYTES > most_needed_ + SLACK_BYTES && !settings.poison)
      return_free();
  }

  void return_free() {
    for_free_pages([&](size_t first, size_t end) { return_pages(first, end); });
    most_needed_ = std::max(most_needed_, resident_pages_ * HUGE_PAGE_BYTES);
  }

  void return_pages(size_t first, size_t end) {
    auto begin = is_resident_.begin() + first;
    auto resident = std::count(begin, begin + (end - first), true);
    if (resident == 0)
      return;
    madvise(base_ + first * HUGE_PAGE_BYTES, (end - first) * HUGE_PAGE_BYTES, MADV_DONTNEED);
    std::fill(begin, begin + (end - first), false);
    resident_pages_ -= resident;
  }

  bool commit(size_t end) {
    if (end <= committed_)
      return true;
    size_t wanted = round_up(end, HUGE_PAGE_BYTES);
    if (wanted > size_ || mprotect(base_ + committed_, wanted - committed_, PROT_READ | PROT_WRITE) != 0)
      return false;
    committed_ = wanted;
    is_resident_.resize(committed_ / HUGE_PAGE_BYTES);
    committed_peak_ = std::max(committed_peak_, committed_);
    return true;
  }

  void decommit(size_t end) {
    size_t left = round_up(end, HUGE_PAGE_BYTES);
    if (left >= committed_)
      return;
    return_pages(left / HUGE_PAGE_BYTES, committed_ / HUGE_PAGE_BYTES);
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
  size_t most_needed_ = 0;  // since the last trim: what was left when all was returned that could be
  size_t allocations_ = 0;
  size_t recent_top_ = 0;
  int64_t runs_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::map<size_t, size_t> free_by_offset_;
  std::set<std::pair<size_t, size_t>> free_by_size_;
  std::unordered_map<size_t, Block> live_;
  Layout layout_;
  size_t settling_runs_ = 0;
  std::vector<bool> is_resident_;  // by huge page; it may be if a block has lain on it
  size_t resident_pages_ = 0;
};

}  // namespace ssdtrain
