// Streams and events: a stream is a queue of kernels with a thread of its own, which may start each of them late.
#pragma once

#include "order.h"

#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace twins {

constexpr auto kTwin = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr int kStreams = 24;  // of each device, which are handed out in turn, as CUDA does with 32

// A point in a stream, which it reaches once.
class Point {
 public:
  const int64_t number = next_++;  // by which it is called in the noted order

  void reach() {
    std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  static inline std::atomic<int64_t> next_{1};
};
using PointPtr = std::shared_ptr<Point>;

// How late kernels start: a `share` of all by up to `longest_us` microseconds, of collectives by `collectives_us`.
struct Delays {
  uint64_t seed = 0;
  double share = 0.0;
  int longest_us = 0, collectives_us = 0;
};

// What kernels have raised, which the next one to wait for a stream is told, as on a GPU.
class Failure {
 public:
  void note(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (what_.empty()) what_ = what;
  }
  void raise() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto what = std::exchange(what_, "");
    lock.unlock();
    TORCH_CHECK(what.empty(), "a kernel failed: ", what);
  }

 private:
  std::mutex mutex_;
  std::string what_;
};
inline Failure& failure() {
  static auto* one = new Failure();  // threads outlive static objects
  return *one;
}

inline void wait_on_host(Point& point) {
  point.wait();
  order().note({"wait", kHost, kHost, point.number});
  failure().raise();
}

class Queue {
 public:
  Queue(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {
    std::thread([this] { work(); }).detach();
  }

  const c10::DeviceIndex device;
  const c10::StreamId id;

  void put(std::function<void()> kernel, bool may_be_late = true) { add({std::move(kernel), may_be_late, true}); }
  // The same of a kernel that uses this memory.
  void put(const std::string& name, Ranges reads, Ranges writes, std::function<void()> kernel,
           bool may_be_late = true) {
    if (order().is_on()) order().note({"use", device, id, 0, name, std::move(reads), std::move(writes)});
    put(std::move(kernel), may_be_late);
  }
  // Reached once all that has been put so far has run.
  PointPtr mark() {
    auto point = std::make_shared<Point>();
    if (order().is_on()) order().note({"reach", device, id, point->number});
    add({[point] { point->reach(); }, false, false});
    return point;
  }
  // What is put from here on waits for `point`.
  void wait_for(PointPtr point) {
    if (order().is_on()) order().note({"wait", device, id, point->number});
    add({[point] { point->wait(); }, false, true, point});
  }
  void synchronize() { wait_on_host(*mark()); }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return left_ == 0;
  }
  // Whether nothing is left that could run before another stream has come further. `done` is how much has run so far.
  bool has_settled(int64_t& done) {
    std::lock_guard<std::mutex> lock(mutex_);
    done = done_;
    return (kernels_.empty() && !runs_) || (awaited_ != nullptr && !awaited_->is_reached());
  }
  void set_delays(const Delays& delays) {
    std::lock_guard<std::mutex> lock(mutex_);
    delays_ = delays;
    random_.seed(delays.seed * 1000003 + static_cast<uint64_t>(device * 1009 + id));
  }

 private:
  struct Kernel {
    std::function<void()> run;
    bool may_be_late, counts;
    PointPtr awaited = nullptr;
  };

  void add(Kernel kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kernel.counts) left_++;
    kernels_.push_back(std::move(kernel));
    changed_.notify_one();
  }
  void work() {
    is_stream = true;
    c10::AutoGradMode no_grad(false);
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !kernels_.empty(); });
      auto kernel = std::move(kernels_.front());
      kernels_.pop_front();
      runs_ = true;
      awaited_ = kernel.awaited;
      auto late = kernel.may_be_late ? lateness() : std::chrono::microseconds(0);
      lock.unlock();
      if (late.count() > 0) std::this_thread::sleep_for(late);
      try {
        kernel.run();
      } catch (const std::exception& error) {
        failure().note(error.what());
      }
      lock.lock();
      if (kernel.counts) left_--;
      runs_ = false;
      awaited_ = nullptr;
      done_++;
    }
  }
  std::chrono::microseconds lateness() {
    std::uniform_real_distribution<double> number(0.0, 1.0);
    if (delays_.share == 0.0 || number(random_) >= delays_.share) return std::chrono::microseconds(0);
    auto longest_us = id > kStreams ? delays_.collectives_us : delays_.longest_us;
    return std::chrono::microseconds(static_cast<int64_t>(number(random_) * longest_us));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Kernel> kernels_;
  int left_ = 0;  // of what has been put, apart from marks
  int64_t done_ = 0;
  bool runs_ = false;
  PointPtr awaited_;  // by what runs now
  Delays delays_;
  std::mt19937_64 random_;
};

// All streams by their numbers: 0 is the default one, those after `kStreams` are of process groups and given back.
class Streams {
 public:
  Queue& at(c10::DeviceIndex device, c10::StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return made(device, id);
  }
  Queue& next(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    turn_[device] = turn_[device] % kStreams + 1;
    return made(device, turn_[device]);
  }
  Queue& take(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& given_back = given_back_[device];
    if (given_back.empty()) return made(device, static_cast<c10::StreamId>(1 + kStreams + taken_[device]++));
    auto id = given_back.back();
    given_back.pop_back();
    return made(device, id);
  }
  void give_back(Queue& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_back_[queue.device].push_back(queue.id);
  }
  std::vector<Queue*> of(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Queue*> all;
    for (auto* queue : queues_[device]) if (queue != nullptr) all.push_back(queue);
    return all;
  }
  // The streams that process groups have taken.
  std::vector<Queue*> of_groups() {
    std::vector<Queue*> found;
    for (auto* queue : all()) if (queue->id > kStreams) found.push_back(queue);
    return found;
  }
  void set_delays(const Delays& delays) {
    for (auto* queue : all()) queue->set_delays(delays);
    std::lock_guard<std::mutex> lock(mutex_);
    delays_ = delays;
  }
  // Until all has run that can without what is held.
  void settle() {
    std::vector<int64_t> before;
    for (auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);;) {
      TORCH_CHECK(std::chrono::steady_clock::now() < until, "streams that are not held go on for 30 s");
      std::vector<int64_t> done;
      bool settled = true;
      for (auto* queue : all()) settled = queue->has_settled(done.emplace_back()) && settled;
      if (settled && done == before) return;
      before = settled ? std::move(done) : std::vector<int64_t>();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

 private:
  std::vector<Queue*> all() {
    std::vector<Queue*> found;
    for (c10::DeviceIndex device = 0; device < kDevices; device++) {
      auto here = of(device);
      found.insert(found.end(), here.begin(), here.end());
    }
    return found;
  }
  Queue& made(c10::DeviceIndex device, c10::StreamId id) {
    auto& queues = queues_[device];
    if (queues.size() <= static_cast<size_t>(id)) queues.resize(id + 1, nullptr);
    if (queues[id] == nullptr) {
      queues[id] = new Queue(device, id);
      queues[id]->set_delays(delays_);
    }
    return *queues[id];
  }

  std::mutex mutex_;
  std::array<std::vector<Queue*>, kDevices> queues_;
  std::array<std::vector<c10::StreamId>, kDevices> given_back_;
  std::array<int, kDevices> turn_{}, taken_{};
  Delays delays_;
};
inline Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kDevices> current_streams{};

inline Queue& queue_of(const c10::Stream& stream) { return streams().at(stream.device_index(), stream.id()); }
inline c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kTwin, queue.device), queue.id);
}
inline Queue& current_queue(c10::DeviceIndex device) { return streams().at(device, current_streams[device]); }

}  // namespace twins
