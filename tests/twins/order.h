// What is done on which stream behind what, noted while a test asks for it: happens_before.py looks for races in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace twins {

constexpr int64_t kHost = -1;  // in place of a stream: all threads of the host, in the order in which they come here

// Bytes of a block of memory, from where that begins.
struct Range {
  uintptr_t block;
  int64_t begin, end;
};
using Ranges = std::vector<Range>;

// "use": a kernel, or the host, reads and writes; "reach": a stream comes to a point; "wait": it waits for one;
// "recorded": the allocator has seen that a stream has come there which uses a block, so that others may use it next.
struct Step {
  std::string kind;
  int64_t device, stream;
  int64_t point = 0;
  std::string name;
  Ranges reads, writes;
};

class Order {
 public:
  bool is_on() const { return on_; }
  void begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    steps_.clear();
    on_ = true;
  }
  std::vector<Step> end() {
    std::lock_guard<std::mutex> lock(mutex_);
    on_ = false;
    return std::exchange(steps_, {});
  }
  void note(Step step) {
    if (!on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (on_) steps_.push_back(std::move(step));
  }

 private:
  std::mutex mutex_;
  std::vector<Step> steps_;
  std::atomic<bool> on_{false};
};
inline Order& order() {
  static auto* one = new Order();
  return *one;
}

// Whether this thread is a stream: what its kernels call has been noted already.
inline thread_local bool is_stream = false;

}  // namespace twins
