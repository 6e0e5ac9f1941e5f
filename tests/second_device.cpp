// A device type with two devices, whose memory and kernels are the CPU's and whose streams are threads: for models on
// several devices, which autograd runs in a thread for each, and for races of streams, on a machine without any device.
// See second_device.py.
#include "twins/process_group.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

namespace twins {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kTwin, &allocator);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("is_set_to",
         [](const at::Tensor& self, const at::Tensor& other) { return at::native::is_set_to(self, other); });
  m.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) { return at::cpu::as_strided(self, size, stride, offset); });
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
}

}  // namespace twins

namespace {

at::CallbackHandle callback;

// Keeps these streams from running anything until what it returns is called.
std::function<void()> hold(const std::vector<twins::Queue*>& queues) {
  auto point = std::make_shared<twins::Point>();
  for (auto* queue : queues) queue->wait_for(point);
  return [point] { point->reach(); };
}

py::list as_tuples(const twins::Ranges& ranges) {
  py::list tuples;
  for (const auto& range : ranges) tuples.append(py::make_tuple(range.block, range.begin, range.end));
  return tuples;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new twins::Hooks());
  torch::utils::set_requires_device_init(twins::kTwin, false);  // torch 2.11 waits for no device that is not initialised
  m.def("backend", [](std::vector<twins::Backend::Inner> inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<twins::Backend>(std::move(inner));
  });
  m.def("set_delays", [](uint64_t seed, double share, int longest_us, int collectives_us) {
    twins::streams().set_delays({seed, share, longest_us, collectives_us});
  });
  m.def("hold", [](c10::DeviceIndex device, c10::StreamId stream) {
    return hold({&twins::streams().at(device, stream)});
  });
  m.def("hold_collectives", [] { return hold(twins::streams().of_groups()); });
  m.def("settle", [] { twins::streams().settle(); }, py::call_guard<py::gil_scoped_release>());
  m.def("begin_order", [] {
    twins::order().begin();
    using Callback = at::RecordFunctionCallback;
    callback = at::addGlobalCallback(
        Callback(&twins::note_use_by_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  });
  m.def("end_order", [] {
    at::removeCallback(callback);
    py::list steps;
    for (const auto& step : twins::order().end()) {
      steps.append(py::make_tuple(step.kind, step.device, step.stream, step.point, step.name, as_tuples(step.reads),
                                  as_tuples(step.writes)));
    }
    return steps;
  });
  m.def("keep_tensors", [](bool keep) { twins::keeps_tensors = keep; });
  m.def("waited_for", [] {
    std::lock_guard<std::mutex> lock(twins::waited_for_mutex);
    return std::vector<std::string>(twins::waited_for().begin(), twins::waited_for().end());
  });
}
