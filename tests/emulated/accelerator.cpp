// An accelerator that is none: memory of the host behind a device type of its own, "accel:0".
//
// What PyTorch refuses on a GPU it refuses here: operands on different devices, an accelerator's
// memory as a NumPy array, a generator of the CPU. Every operator moves its operands to the CPU, runs
// there and moves the results back. It has random numbers of its own, and backward runs on a thread
// of its own, as on every accelerator.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::IntArrayRef;

constexpr auto kAccel = c10::DeviceType::PrivateUse1;
const c10::Device accel_device(kAccel, 0);
std::atomic<int64_t> synchronizations{0};

// Memory

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, accel_device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
};
HostMemory memory;
REGISTER_ALLOCATOR(kAccel, &memory);

// One device with one stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override {
    return kAccel;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return accel_device;
  }
  c10::Device getDevice() const override {
    return accel_device;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, accel_device);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, accel_device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {
    ++synchronizations;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

// Random numbers: the state of the accelerator's generator stands in the CPU's while it draws

std::mutex& chance_mutex() {
  static std::mutex mutex;
  return mutex;
}

at::Generator& chance() {
  static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  return generator;
}

class Drawing {
 public:
  Drawing() : lock_(chance_mutex()), cpu_(at::detail::getDefaultCPUGenerator()), kept_(cpu_.get_state()) {
    cpu_.set_state(chance().get_state());
  }
  ~Drawing() {
    chance().set_state(cpu_.get_state());
    cpu_.set_state(kept_);
  }

 private:
  std::lock_guard<std::mutex> lock_;
  at::Generator cpu_;
  Tensor kept_;
};

// Operators

/// Takes a value of the CPU only where a GPU would: a single number without a dimension, an index.
void check(const c10::OperatorHandle& op, const Tensor& tensor) {
  if (!tensor.defined() || tensor.device() == accel_device || tensor.dim() == 0) {
    return;
  }
  const auto& name = op.schema().operator_name().name;
  const bool takes_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
      name == "aten::_pack_padded_sequence";
  TORCH_CHECK(
      takes_indices,
      "Expected all tensors to be on the same device, but found at least two devices, ",
      accel_device, " and ", tensor.device(), "! (when checking arguments of ", name, ")");
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (const auto& value : torch::jit::last(*stack, arguments.size())) {
    if (value.isTensor()) {
      check(op, value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorList()) {
        check(op, tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) {
          check(op, *tensor);
        }
      }
    } else if (value.isGenerator()) {
      TORCH_CHECK(
          value.toGenerator().device() == accel_device,
          "Expected a '", accel_device.type(), "' device type for generator but found '",
          value.toGenerator().device().type(), "'");
    }
  }
  std::optional<Drawing> drawing;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    drawing.emplace();
  }
  at::native::cpu_fallback(op, stack);
}

Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

std::optional<Tensor> on_cpu(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<Tensor>(on_cpu(*tensor)) : std::nullopt;
}

Tensor empty(
    IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  return on_cpu(self).item();
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  return at::native::set_(self, source);
}

Tensor& set_part_of_storage(
    Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

bool can_take_data_of(const Tensor&, const Tensor&) {
  return true;  // as between CPU and CUDA: a parameter that moves stays the same object
}

// CUDA has kernels of its own for these; without them a backend gets none.

void check_same(std::initializer_list<const Tensor> tensors) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK(
        !tensor.defined() || tensor.device() == accel_device,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        accel_device, " and ", tensor.device(), "!");
  }
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  check_same({input, weight, bias.value_or(Tensor())});
  return at::convolution(
             on_cpu(input), on_cpu(weight), on_cpu(bias), stride, padding, dilation, transposed,
             output_padding, groups)
      .to(accel_device);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  check_same({gradient, input, weight});
  const int64_t channels = gradient.size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), IntArrayRef(channels), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  const auto back = [](const Tensor& tensor) {
    return tensor.defined() ? tensor.to(accel_device) : tensor;
  };
  return {back(of_input), back(of_weight), back(of_bias)};
}

/// Its schema does not say that it writes the running statistics: a copy of them would be lost.
std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_variance,
    bool training,
    double momentum,
    double epsilon) {
  check_same(
      {input, weight.value_or(Tensor()), bias.value_or(Tensor()), running_mean.value_or(Tensor()),
       running_variance.value_or(Tensor())});
  const auto [output, mean, deviation] = at::native_batch_norm(
      on_cpu(input), on_cpu(weight), on_cpu(bias), on_cpu(running_mean), on_cpu(running_variance), training,
      momentum, epsilon);
  return {output.to(accel_device), mean.to(accel_device), deviation.to(accel_device)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part_of_storage);
  m.impl("_has_compatible_shallow_copy_type", can_take_data_of);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());  // it computes in the precision that it is given
}

// What Python calls

void set_up() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

void seed(int64_t number) {
  std::lock_guard<std::mutex> lock(chance_mutex());
  chance().set_current_seed(static_cast<uint64_t>(number));
}

Tensor get_state() {
  std::lock_guard<std::mutex> lock(chance_mutex());
  return chance().get_state();
}

void set_state(const Tensor& state) {
  std::lock_guard<std::mutex> lock(chance_mutex());
  chance().set_state(state);
}

int64_t num_synchronizations() {
  return synchronizations;
}

TORCH_LIBRARY(emulated, m) {
  m.def("set_up() -> ()", set_up);
  m.def("seed(int number) -> ()", seed);
  m.def("get_state() -> Tensor", get_state);
  m.def("set_state(Tensor state) -> ()", set_state);
  m.def("num_synchronizations() -> int", num_synchronizations);
}

}  // namespace
