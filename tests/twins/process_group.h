// A backend whose collectives run on a stream of their own, as NCCL's do: to wait for one only orders streams.
#pragma once

#include "kernels.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>

namespace twins {

// Whether a collective keeps its tensors until it is waited for: false is a fault for tests to find.
inline std::atomic<bool> keeps_tensors{true};

class Work final : public c10d::Work {
 public:
  Work(PointPtr end, std::vector<at::Tensor> tensors, c10::intrusive_ptr<c10::ivalue::Future> future,
       c10::DeviceIndex device)
      : end_(std::move(end)), kept_(std::move(tensors)), future_(std::move(future)), device_(device) {}
  bool isCompleted() override { return end_->is_reached(); }
  bool isSuccess() const override { return end_->is_reached(); }
  void synchronize() override {
    current_queue(device_).wait_for(end_);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  PointPtr end_;
  std::vector<at::Tensor> kept_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::DeviceIndex device_;
};

using Tensors = std::vector<at::Tensor>;

// Reduces through backends of the CPU, one for each device, as each device's stream has an order of its own.
class Backend final : public c10d::Backend {
 public:
  using Inner = c10::intrusive_ptr<c10d::Backend>;
  explicit Backend(std::vector<Inner> inner)
      : c10d::Backend(inner.at(0)->getRank(), inner.at(0)->getSize()), inner_(std::move(inner)) {
    for (c10::DeviceIndex device = 0; device < kDevices; device++) queues_.push_back(&streams().take(device));
  }
  ~Backend() override {
    for (auto* queue : queues_) streams().give_back(*queue);
  }
  const std::string getBackendName() const override { return "twins"; }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch("allreduce", tensors, tensors, [options](Inner& inner, Tensors& on_cpu) {
      return inner->allreduce(on_cpu, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch("broadcast", tensors, tensors, [options](Inner& inner, Tensors& on_cpu) {
      return inner->broadcast(on_cpu, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& into, at::Tensor& from,
                                                 const c10d::AllgatherOptions& options) override {
    return launch("allgather", {into, from}, {into}, [options](Inner& inner, Tensors& on_cpu) {
      for (auto& tensor : on_cpu) tensor = tensor.view(-1);
      return inner->_allgather_base(on_cpu[0], on_cpu[1], options);
    });
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return launched_; }

 private:
  using Collective = std::function<c10::intrusive_ptr<c10d::Work>(Inner&, Tensors&)>;

  c10::intrusive_ptr<c10d::Work> launch(const char* name, const Tensors& tensors, const Tensors& results,
                                        Collective collective) {
    auto device = tensors.at(0).get_device();
    auto& queue = *queues_.at(device);
    queue.wait_for(current_queue(device).mark());
    std::vector<Place> places(tensors.begin(), tensors.end());
    Ranges reads, writes;
    for (const auto& tensor : tensors) extend(reads, ranges_of(tensor));
    for (const auto& tensor : results) extend(writes, ranges_of(tensor));
    auto run = [inner = inner_.at(device), places = std::move(places), collective = std::move(collective)]() mutable {
      Tensors on_cpu;
      for (const auto& place : places) on_cpu.push_back(place.on_cpu());
      collective(inner, on_cpu)->wait();
    };
    queue.put(name, std::move(reads), std::move(writes), std::move(run));
    launched_++;
    auto kept = keeps_tensors ? tensors : Tensors();
    auto done = future(queue, keeps_tensors ? results : Tensors());
    return c10::make_intrusive<Work>(queue.mark(), std::move(kept), std::move(done), device);
  }
  static c10::intrusive_ptr<c10::ivalue::Future> future(Queue& queue, const Tensors& results) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{{kTwin, queue.device}});
    auto before = std::exchange(current_streams[queue.device], queue.id);
    future->markCompleted(c10::IValue(results));
    current_streams[queue.device] = before;
    return future;
  }

  std::vector<Inner> inner_;
  std::vector<Queue*> queues_;
  std::atomic<uint64_t> launched_{0};
};

}  // namespace twins
