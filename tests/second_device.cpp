// A device type with two devices, whose memory and kernels are the CPU's and whose streams are threads: for models on
// several devices, which autograd runs in a thread for each, and for races of streams, on a machine without any device.
// See second_device.py.
#include "twins/process_group.h"

#include <pybind11/functional.h>
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
  m.impl("is_set_to", [](const at::Tensor& self, const at::Tensor& other) { return at::native::is_set_to(self, other); });
  m.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) { return at::cpu::as_strided(self, size, stride, offset); });
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
}

}  // namespace twins

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new twins::Hooks());
  m.def("backend", [](std::vector<twins::Backend::Inner> inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<twins::Backend>(std::move(inner));
  });
  m.def("set_delays", [](uint64_t seed, double share, int longest_us, int collectives_us) {
    twins::streams().set_delays({seed, share, longest_us, collectives_us});
  });
  m.def("hold", [](c10::DeviceIndex device, c10::StreamId stream) -> std::function<void()> {
    auto point = std::make_shared<twins::Point>();
    twins::streams().at(device, stream).wait_for(point);
    return [point] { point->reach(); };
  });
  m.def("keep_tensors", [](bool keep) { twins::keeps_tensors = keep; });
  m.def("waited_for", [] {
    std::lock_guard<std::mutex> lock(twins::waited_for_mutex);
    return std::vector<std::string>(twins::waited_for().begin(), twins::waited_for().end());
  });
}
