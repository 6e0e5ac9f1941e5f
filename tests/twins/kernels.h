// Kernels: those of the CPU, on the same memory, in the thread of the current stream.
#pragma once

#include "guard.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace twins {

// Where a tensor lies. A kernel holds no memory: what is freed before it runs, it uses all the same.
struct Place {
  explicit Place(const at::Tensor& tensor)
      : data(tensor.mutable_data_ptr()), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}
  at::Tensor on_cpu() const { return at::from_blob(data, sizes, strides, at::TensorOptions(dtype).device(at::kCPU)); }

  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

inline bool is_number(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

inline at::Tensor new_like(const at::Tensor& meta, c10::Device device) {
  return at::empty_strided(meta.sizes(), meta.strides(), at::TensorOptions(meta.scalar_type()).device(device));
}

// ---- copies ---------------------------------------------------------------------------------------------------------

inline void copy_between(const at::Tensor& from, const at::Tensor& to) {
  auto& source = current_queue(from.get_device());
  auto& target = current_queue(to.get_device());
  auto copy = [from = Place(from), to = Place(to)] { to.on_cpu().copy_(from.on_cpu()); };
  if (&source == &target) return source.put("copy_", ranges_of(from), ranges_of(to), copy);
  source.wait_for(target.mark());  // as CUDA: on the source's stream, between both devices' work before and after
  source.put("copy_", ranges_of(from), ranges_of(to), copy);
  target.wait_for(source.mark());
}

inline void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& queue = current_queue(to.get_device());
  auto* pinned = non_blocking ? pool().pinned(from.data_ptr()) : nullptr;
  if (pinned != nullptr) {
    pool().record(pinned, queue);
    auto copy = [from = Place(from), to = Place(to)] { to.on_cpu().copy_(from.on_cpu()); };
    queue.put("copy_ from the host", ranges_of(from), ranges_of(to), copy);
  } else {
    auto copy = [from = from.clone(), to = Place(to)] { to.on_cpu().copy_(from); };
    queue.put("copy_ from the host", {}, ranges_of(to), copy);
    if (!non_blocking) queue.synchronize();
  }
}

inline void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& queue = current_queue(from.get_device());
  auto* pinned = non_blocking ? pool().pinned(to.data_ptr()) : nullptr;
  if (pinned != nullptr) pool().record(pinned, queue);
  auto copy = [from = Place(from), to = Place(to)] { to.on_cpu().copy_(from.on_cpu()); };
  queue.put("copy_ to the host", ranges_of(from), ranges_of(to), copy);
  if (pinned == nullptr) queue.synchronize();
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  if (from.is_cpu()) copy_from_host(from, to, non_blocking);
  else if (to.is_cpu()) copy_to_host(from, to, non_blocking);
  else copy_between(from, to);
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    auto resized = at::empty_strided(from.sizes(), from.strides(), to.options());
    to.unsafeGetTensorImpl()->shallow_copy_from(resized.getIntrusivePtr());
  }
  return copy_from(from, to, false);
}

// ---- tensors --------------------------------------------------------------------------------------------------------

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kTwin, current_device)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kTwin, current_device)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  current_queue(tensor.get_device()).synchronize();
  order().note({"use", kHost, kHost, 0, "item", ranges_of(tensor), {}});
  return Place(tensor).on_cpu().item();
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// ---- every other operator -------------------------------------------------------------------------------------------

using Argument = std::function<c10::IValue()>;

// `value` with each tensor in it replaced.
inline c10::IValue replaced(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& by) {
  if (value.isTensor()) return value.toTensor().defined() ? by(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(by(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(by(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// The device of the arguments. As on a GPU, only numbers may come from another one.
inline std::optional<c10::Device> device_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  for (const auto& value : arguments) {
    replaced(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || is_number(tensor)) return tensor;
      auto name = op.schema().name();
      TORCH_CHECK(!found || tensor.device() == *found, name, " of tensors on ", *found, " and ", tensor.device());
      found = tensor.device();
      return tensor;
    });
  }
  return found;
}

inline at::Tensor as_meta(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : new_like(tensor, c10::DeviceType::Meta);
}

// What a kernel gets in place of `value`: numbers are copied now, tensors are where they are.
inline Argument argument(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const auto& tensor = value.toTensor();
    if (!tensor.is_cpu()) return [place = Place(tensor)] { return place.on_cpu(); };
    auto number = tensor.clone();
    number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return [number] { return number; };
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) return [value] { return value; };
  std::vector<std::optional<Place>> places;
  replaced(value, [&](const at::Tensor& tensor) {
    places.emplace_back(Place(tensor));
    return tensor;
  });
  // Held for its form alone: which elements of the list are there.
  auto form = replaced(value, [](const at::Tensor&) { return at::empty({0}, at::TensorOptions(at::kCPU)); });
  return [form, places] {
    size_t next = 0;
    return replaced(form, [&](const at::Tensor&) { return places[next++]->on_cpu(); });
  };
}

// The operators that made the host wait, as nothing tells the shapes of their results beforehand.
inline std::set<std::string>& waited_for() {
  static auto* names = new std::set<std::string>();
  return *names;
}
inline std::mutex waited_for_mutex;

// The argument that return value number `index` is, if it is one.
inline std::optional<size_t> returned_argument(const c10::FunctionSchema& schema, size_t index) {
  const auto* alias = schema.returns()[index].alias_info();
  if (alias == nullptr) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

// Whether what `op` returns and writes is known before it runs: then `results` are like what it returns.
inline bool infer(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                  std::vector<c10::IValue>& results) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::nondeterministic_seeded) || op.hasTag(at::Tag::data_dependent_output)) return false;
  for (const auto& value : schema.returns()) if (value.type()->kind() != c10::TypeKind::TensorType) return false;
  torch::jit::Stack metas;
  for (const auto& value : arguments) {
    if (value.isDevice() || value.isStorage() || value.isStream()) return false;
    metas.push_back(replaced(value, as_meta));
  }
  auto before = metas;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  } catch (const std::exception&) {
    return false;
  }
  for (size_t i = 0; i < arguments.size(); i++) {  // an out= that gets its shape now
    if (!arguments[i].isTensor() || before[i].toTensor().sizes() == arguments[i].toTensor().sizes()) continue;
    const auto& empty = arguments[i].toTensor();
    if (empty.numel() > 0) return false;
    empty.unsafeGetTensorImpl()->shallow_copy_from(new_like(before[i].toTensor(), empty.device()).getIntrusivePtr());
  }
  results = std::move(metas);
  return true;
}

// The memory that arguments of an operator cover: what it reads, and what it writes.
inline std::pair<Ranges, Ranges> uses(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  std::pair<Ranges, Ranges> found;
  if (!order().is_on()) return found;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    auto& into = alias != nullptr && alias->isWrite() ? found.second : found.first;
    replaced(arguments[i], [&](const at::Tensor& tensor) {
      extend(into, ranges_of(tensor));
      return tensor;
    });
  }
  return found;
}

inline bool enqueue(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  std::vector<c10::IValue> results;
  if (!infer(op, arguments, results)) return false;
  std::vector<Argument> given;
  for (const auto& value : arguments) given.push_back(argument(value));
  auto [reads, writes] = uses(schema, arguments);
  std::vector<std::optional<Place>> into;
  for (size_t i = 0; i < results.size(); i++) {
    auto same = returned_argument(schema, i);
    if (same) {
      results[i] = arguments[*same];
    } else if (results[i].toTensor().defined()) {
      results[i] = new_like(results[i].toTensor(), device);
    }
    const auto& result = results[i].toTensor();
    into.push_back(same || !result.defined() ? std::nullopt : std::optional(Place(result)));
    if (into.back()) extend(writes, ranges_of(result));
  }
  auto kernel = [op, given = std::move(given), into = std::move(into)] {
    torch::jit::Stack kernel;
    for (const auto& value : given) kernel.push_back(value());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &kernel);
    for (size_t i = 0; i < into.size(); i++) {
      if (into[i] && kernel[i].toTensor().defined()) into[i]->on_cpu().copy_(kernel[i].toTensor());
    }
  };
  current_queue(device.index()).put(schema.name(), std::move(reads), std::move(writes), std::move(kernel));
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
  return true;
}

// ---- operators of the CPU on pinned memory --------------------------------------------------------------------------

// What a Python list is made of begins with this, which is a view for all else.
inline bool reads_all(const std::string& name) { return name == "aten::resolve_conj"; }

inline bool only_looks_at_form(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names{"aten::_to_copy", "aten::empty_like", "aten::is_pinned",
                                           "aten::pin_memory", "aten::resolve_neg"};
  if (names.count(schema.name()) > 0) return true;
  if (reads_all(schema.name())) return false;
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();  // a view
  });
}

inline std::unique_ptr<at::ObserverContext> note_use_by_host(const at::RecordFunction& called) {
  auto schema = called.operator_schema();
  if (is_stream || !schema || only_looks_at_form(*schema)) return nullptr;
  auto inputs = called.inputs();
  if (inputs.size() != schema->arguments().size()) return nullptr;
  bool has_device = false;
  for (const auto& value : inputs) {
    replaced(value, [&](const at::Tensor& tensor) {
      has_device = has_device || (tensor.defined() && tensor.device().type() == kTwin);
      return tensor;
    });
  }
  if (has_device) return nullptr;  // a kernel, which notes it by itself
  auto [reads, writes] = uses(*schema, inputs);
  if (reads.empty() && writes.empty()) return nullptr;
  order().note({"use", kHost, kHost, 0, schema->name(), std::move(reads), std::move(writes)});
  return nullptr;
}

inline void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto device = device_of(op, torch::jit::last(*stack, op.schema().arguments().size()));
  c10::OptionalDeviceGuard guard(device);
  if (device && device->type() == kTwin && enqueue(op, stack, *device)) return;
  {
    std::lock_guard<std::mutex> lock(waited_for_mutex);
    waited_for().insert(op.schema().name());
  }
  at::native::cpu_fallback(op, stack);  // copies, and so waits
}

}  // namespace twins
