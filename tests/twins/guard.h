// What torch asks of a device: its streams, its events and which of them are current.
#pragma once

#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace twins {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kTwin; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kTwin, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kTwin, current_device);
    uncheckedSetDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_queue(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(streams().at(index(device), 0)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(streams().next(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto* queue : streams().of(device)) queue->synchronize();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new PointPtr();
    *static_cast<PointPtr*>(*event) = queue_of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) queue_of(stream).wait_for(*static_cast<PointPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<PointPtr*>(event))->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_on_host(**static_cast<PointPtr*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<PointPtr*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (auto* block = block_of(memory)) pool().record(block, queue_of(stream));
  }

 private:
  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return pool().pinned(data) != nullptr; }
};

}  // namespace twins
