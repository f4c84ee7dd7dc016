#include "kernel.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_map>
#include <unordered_set>

#include "generator.h"
#include "tensor.h"

namespace sim {
namespace {

using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

std::atomic<uint64_t> late{0}, in_step{0};

// Call `f` for each tensor that a value holds, and put what it returns in the place.
template <class F>
void map_tensors(IValue& value, F f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(f(tensor));
    value = mapped;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<at::Tensor>(f(*tensor)) : std::nullopt);
    value = mapped;
  }
}

template <class F>
void each_tensor(const IValue& value, F f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) f(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) f(*tensor);
  }
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// One call: the operator and its arguments, which lie on the stack.
class Call {
 public:
  Call(const OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), count_(schema_.arguments().size()), first_(stack->size() - count_) {}

  void run() {
    raise_reported();
    const auto device = the_device();
    c10::DeviceGuard guard(device);
    const auto generator = take_generator(device);
    if (!can_be_late()) return wait_and_compute(generator);
    const Shapes* shapes = find_shapes();
    if (!shapes) return wait_and_compute(generator);
    resize(*shapes);
    auto returned = outputs(*shapes, device);
    auto& queue = queue_of(device.index());
    late++;
    if (generator) drawing(*generator, queue);
    queue.push(job(returned), uses(returned));
    if (generator) drawn(*generator, queue);
    torch::jit::drop(*stack_, count_);
    for (auto& value : returned) stack_->push_back(std::move(value));
  }

 private:
  struct Shape {
    bool is_defined = false;
    std::vector<int64_t> size, stride;
    at::ScalarType dtype = at::kFloat;
  };
  struct Shapes {
    std::vector<std::vector<Shape>> returned;  // of new tensors; of a written argument, nothing
    std::vector<Shape> arguments;              // of those that are written, after the call
  };

  IValue& argument(size_t i) { return (*stack_)[first_ + i]; }

  [[noreturn]] void refuse(c10::Device one, c10::Device other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", schema_.operator_name(), " got ", one,
                " and ", other);
  }

  // The CPU's kernels would not notice two devices.
  c10::Device the_device() {
    std::optional<c10::Device> device;
    for (size_t i = 0; i < count_; i++) {
      each_tensor(argument(i), [&](const at::Tensor& tensor) {
        if (!is_simulated(tensor)) return;
        if (device && *device != tensor.device()) refuse(*device, tensor.device());
        device = tensor.device();
      });
    }
    for (size_t i = 0; i < count_; i++) {
      each_tensor(argument(i), [&](const at::Tensor& tensor) {
        if (device && tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) refuse(*device, tensor.device());
      });
      if (!device && argument(i).isDevice() && argument(i).toDevice().type() == TYPE) device = argument(i).toDevice();
    }
    return c10::Device(TYPE, index_of(device.value_or(c10::Device(TYPE))));
  }

  // Hand the CPU's generator to the CPU's kernel; return the device's.
  std::optional<at::Generator> take_generator(c10::Device device) {
    for (size_t i = 0; i < count_; i++) {
      if (schema_.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
      auto& value = argument(i);
      auto generator = value.isGenerator() ? value.toGenerator() : default_generator(device.index());
      TORCH_CHECK(generator.device().type() == TYPE, "Expected a '", device, "' device type for generator but found '",
                  generator.device(), "'");
      value = inner(generator);
      return generator;
    }
    return std::nullopt;
  }

  bool can_be_late() const {
    for (const auto& value : schema_.returns()) {
      const auto kind = value.type()->kind();
      const bool tensors = kind == c10::ListType::Kind && value.type()->str() == "Tensor[]";
      if (kind != c10::TensorType::Kind && !tensors) return false;
      TORCH_CHECK(!value.alias_info() || value.alias_info()->isWrite(),
                  "the simulated accelerator lacks the view ", schema_.operator_name());
    }
    return true;
  }

  void wait_and_compute(const std::optional<at::Generator>& generator) {
    in_step++;
    if (generator) settle(*generator);
    at::native::cpu_fallback(op_, stack_);
  }

  // All that shapes depend on; nothing if that is not known.
  std::optional<std::string> key() {
    std::string bytes;
    auto add = [&](auto value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
    auto add_all = [&](at::IntArrayRef values) {
      add(values.size());
      for (auto value : values) add(value);
    };
    add(&schema_);
    for (size_t i = 0; i < count_; i++) {
      const auto& value = argument(i);
      if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
        add('t');
        each_tensor(value, [&](const at::Tensor& tensor) {
          add(tensor.defined());
          if (!tensor.defined()) return;
          add(tensor.scalar_type());
          add(is_simulated(tensor));
          add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
          add_all(tensor.sizes());
          add_all(tensor.strides());
        });
      } else if (value.isNone()) {
        add('n');
      } else if (value.isInt()) {
        add('i'), add(value.toInt());
      } else if (value.isDouble()) {
        add('d'), add(value.toDouble());
      } else if (value.isBool()) {
        add('b'), add(value.toBool());
      } else if (value.isIntList()) {
        add('l'), add_all(value.toIntVector());
      } else if (value.isBoolList()) {
        add('m');
        for (bool each : value.toBoolList()) add(each);
      } else if (value.isString()) {
        add('s'), bytes += value.toStringRef(), add('\0');
      } else if (value.isDevice() || value.isGenerator()) {
        add('o');
      } else {
        return std::nullopt;
      }
    }
    return bytes;
  }

  const Shapes* find_shapes() {
    static std::mutex mutex;
    static auto& known = *new std::unordered_map<std::string, Shapes>;
    static auto& lacking = *new std::unordered_set<const void*>;  // operators without a Meta kernel
    thread_local Shapes of_this_call;
    // Of what only its backward pass reads Meta and the CPU have different shapes.
    if (schema_.name().rfind("aten::_embedding_bag", 0) == 0) return nullptr;
    const auto name = key();
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (lacking.count(&schema_)) return nullptr;
      if (name)
        if (auto found = known.find(*name); found != known.end()) return &found->second;
    }
    Stack given(stack_->end() - count_, stack_->end());
    for (auto& value : given) {
      map_tensors(value, on_meta);
      if (value.isDevice()) value = c10::Device(c10::DeviceType::Meta);
    }
    Stack stack = given;
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &stack);
    } catch (const c10::NotImplementedError&) {
      std::lock_guard<std::mutex> lock(mutex);
      lacking.insert(&schema_);
      return nullptr;
    } catch (const std::exception&) {
      return nullptr;  // shapes that depend on values; or a mistake, which the CPU's kernel tells
    }
    Shapes shapes;
    for (size_t r = 0; r < schema_.returns().size(); r++) {
      auto& list = shapes.returned.emplace_back();
      if (!schema_.returns()[r].alias_info())
        each_tensor(stack[r], [&](const at::Tensor& tensor) { list.push_back(shape_of(tensor)); });
    }
    for (size_t i = 0; i < count_; i++)
      shapes.arguments.push_back(
          is_written(schema_.arguments()[i]) && given[i].isTensor() ? shape_of(given[i].toTensor()) : Shape{});
    std::lock_guard<std::mutex> lock(mutex);
    if (name) return &known.emplace(*name, std::move(shapes)).first->second;
    of_this_call = std::move(shapes);
    return &of_this_call;
  }

  static Shape shape_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
  }

  void resize(const Shapes& shapes) {
    for (size_t i = 0; i < count_; i++) {
      const auto& shape = shapes.arguments[i];
      if (!shape.is_defined || argument(i).toTensor().sizes() == shape.size) continue;
      auto tensor = argument(i).toTensor();
      resize_(tensor, shape.size, {});
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.size, shape.stride);
    }
  }

  // New tensors; and, where the operator returns an argument, that.
  Stack outputs(const Shapes& shapes, c10::Device device) {
    Stack returned;
    for (size_t r = 0; r < schema_.returns().size(); r++) {
      const auto& value = schema_.returns()[r];
      if (const auto* alias = value.alias_info()) {
        for (size_t i = 0; i < count_; i++) {
          const auto* other = schema_.arguments()[i].alias_info();
          if (!other || other->beforeSets() != alias->beforeSets()) continue;
          returned.push_back(argument(i));
          break;
        }
        continue;
      }
      std::vector<at::Tensor> made;
      for (const auto& shape : shapes.returned[r])
        made.push_back(shape.is_defined ? new_tensor(shape.size, shape.stride, shape.dtype, device) : at::Tensor());
      if (value.type()->kind() == c10::TensorType::Kind)
        returned.emplace_back(made.at(0));
      else
        returned.emplace_back(made);
    }
    TORCH_INTERNAL_ASSERT(returned.size() == schema_.returns().size(), schema_);
    return returned;
  }

  // Nothing in a job holds memory of the device.
  Job job(const Stack& returned) {
    Stack arguments(stack_->end() - count_, stack_->end()), made;
    for (auto& value : arguments) {
      map_tensors(value, [](const at::Tensor& tensor) {
        if (!tensor.defined() || is_simulated(tensor)) return on_shadow(tensor);
        // A number, which is read now. Its last owner may need Python's lock, which a job must not.
        auto number = tensor.detach().clone();
        number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        return number;
      });
      if (value.isDevice() && value.toDevice().type() == TYPE) value = c10::Device(c10::DeviceType::CPU);
    }
    for (size_t r = 0; r < returned.size(); r++) {
      made.push_back(schema_.returns()[r].alias_info() ? IValue() : returned[r]);
      map_tensors(made.back(), on_shadow);
    }
    return [op = op_, arguments = std::move(arguments), made = std::move(made)]() mutable {
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &arguments);
      for (size_t r = 0; r < made.size(); r++) {
        std::vector<at::Tensor> computed;
        each_tensor(arguments[r], [&](const at::Tensor& tensor) { computed.push_back(tensor); });
        size_t i = 0;
        each_tensor(made[r], [&](const at::Tensor& tensor) {
          const auto& from = computed.at(i++);
          if (!tensor.defined() || !from.defined()) return;
          // Of batch norm in evaluation Meta says as many saved values as channels, the CPU none.
          TORCH_INTERNAL_ASSERT(from.numel() == tensor.numel() || from.numel() == 0, op.schema(), from.sizes(), tensor.sizes());
          if (from.numel()) const_cast<at::Tensor&>(tensor).copy_(from);
        });
      }
    };
  }

  Uses uses(const Stack& returned) {
    Uses all;
    const auto place = here(schema_.name());
    for (size_t i = 0; i < count_; i++)
      each_tensor(argument(i), [&](const at::Tensor& tensor) {
        add_use(all, tensor, is_written(schema_.arguments()[i]), place);
      });
    for (size_t r = 0; r < returned.size(); r++)
      if (!schema_.returns()[r].alias_info())
        each_tensor(returned[r], [&](const at::Tensor& tensor) { add_use(all, tensor, true, place); });
    return all;
  }

  const OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* const stack_;
  const size_t count_, first_;
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

}  // namespace

void kernel(const OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

void take_the_cpus_kernels() {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    if (op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    // torch would call `out=` of structured operators, and the CPU's mse_loss resizes that to the shape of its operands.
    if (!op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    const auto& returned = op->schema().returns();
    auto is_view = [](const c10::Argument& value) { return value.alias_info() && !value.alias_info()->isWrite(); };
    if (std::any_of(returned.begin(), returned.end(), is_view)) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}

Counts counts() { return {late, in_step}; }

}  // namespace sim
