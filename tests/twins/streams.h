// Streams and events: a stream is a queue of kernels with a thread of its own, which may start each of them late.
#pragma once

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

class Queue {
 public:
  Queue(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) { std::thread([this] { work(); }).detach(); }

  const c10::DeviceIndex device;
  const c10::StreamId id;

  void put(std::function<void()> kernel, bool may_be_late = true) {
    std::lock_guard<std::mutex> lock(mutex_);
    left_++;
    kernels_.push_back({std::move(kernel), may_be_late, true});
    changed_.notify_one();
  }
  // Reached once all that has been put so far has run.
  PointPtr mark() {
    auto point = std::make_shared<Point>();
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_.push_back({[point] { point->reach(); }, false, false});
    changed_.notify_one();
    return point;
  }
  // What is put from here on waits for `point`.
  void wait_for(PointPtr point) {
    put([point = std::move(point)] { point->wait(); }, false);
  }
  void synchronize() {
    mark()->wait();
    failure().raise();
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return left_ == 0;
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
  };

  void work() {
    c10::AutoGradMode no_grad(false);
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !kernels_.empty(); });
      auto kernel = std::move(kernels_.front());
      kernels_.pop_front();
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
  void set_delays(const Delays& delays) {
    std::lock_guard<std::mutex> lock(mutex_);
    delays_ = delays;
    for (auto& queues : queues_) for (auto* queue : queues) if (queue != nullptr) queue->set_delays(delays);
  }

 private:
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
