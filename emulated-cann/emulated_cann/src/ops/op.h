// Definition of aclnn operations:
//
//     void Add(In self, In other, Number alpha, Out out) { out.set(at::add(self, other, alpha)); }
//     ACLNN(Add)
// The function's parameters are those of aclnnAddGetWorkspaceSize, without the last two. ACLNN exports both entry
// points. aclnnAddGetWorkspaceSize binds the arguments, because the caller may then destroy its handles. aclnnAdd
// launches the body on a stream. The body gets CPU tensors over device memory. It runs again at every replay if the
// launch was captured, so it must not change its bound arguments. A function with the same parameters checks the
// hardware's constraints before the launch, and throws Refused: ACLNN(Mm, .check = check_mm, .flops = flops_of_mm,
// .workspace = 1024). A DOCUMENTED line before the function names the document of the constraints; see
// runtime/source.h.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "handles.h"
#include "runtime/launch.h"

// The state that the first phase passes to the second.
struct aclOpExecutor {
    emulator::Launch launch;
    // Launches it; empty for emulator::launch. See fused_collective.h.
    std::function<int(aclrtStream, emulator::Launch)> submit = nullptr;
    bool repeatable = false;  // set by aclSetAclOpExecutorRepeatable; otherwise a launch destroys the executor
};

namespace emulator {

// Documented results of the first phase.
constexpr int kInvalid = 161002;     // ACLNN_ERR_PARAM_INVALID
// The emulator does not use a workspace. Hardware does, so callers must allocate one.
constexpr uint64_t kWorkspace = 1024;

// Thrown for a call that the hardware would refuse. The caller gets ACLNN_ERR_PARAM_INVALID and the reason.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Thrown for a call that the hardware accepts and the emulated CANN does not support.
struct NotEmulated : Refused {
    using Refused::Refused;
};

// Thrown for a call that the hardware refuses when it plans the launch. The caller gets ACLNN_ERR_INNER_TILING_ERROR.
struct TilingRefused : Refused {
    using Refused::Refused;
};

inline void require(bool condition, const std::string& reason) {
    if (!condition) throw Refused(reason);
}
inline std::string text(at::ScalarType dtype) { return c10::toString(dtype); }
inline std::string text(int64_t value) { return std::to_string(value); }
inline std::string number(int64_t value) { return std::to_string(value); }

// Returns the message of a refusal and, unless it is NotEmulated, where the rule is documented.
std::string describe_refusal(const Refused& error);

// A tensor argument, which may be null. `tensor()` returns a CPU tensor over device memory, or, for FRACTAL_NZ, a copy
// in ND.
class In {
  public:
    using Handle = const aclTensor*;
    In(const aclTensor* handle);
    // Defined in op.cpp, because every operation would compile them again.
    In(const In&);
    In(In&&) noexcept;
    ~In();
    explicit operator bool() const { return present_; }
    operator at::Tensor() const { return tensor(); }
    at::Tensor tensor() const;
    at::Tensor raw() const { return view_; }  // the storage without conversion, also in FRACTAL_NZ
    at::IntArrayRef sizes() const { return shape_; }
    int64_t size(int64_t dim) const { return shape_.at(dim < 0 ? dim + shape_.size() : dim); }
    int64_t dim() const { return shape_.size(); }
    at::ScalarType dtype() const { return dtype_; }
    aclFormat format() const { return format_; }
    void describe(std::vector<Operand>& operands, Access access = Access::read) const;

  protected:
    bool present_ = false;
    void bind_nz(const aclTensor& handle);

    at::Tensor view_;
    std::vector<int64_t> shape_;
    at::ScalarType dtype_ = at::kFloat;
    aclFormat format_ = ACL_FORMAT_ND;
    const void* address_ = nullptr;  // device address
    size_t bytes_ = 0;
    std::vector<int64_t> matrix_;  // in FRACTAL_NZ, the shape before transposition; empty in ND
    bool transposed_ = false;      // in FRACTAL_NZ, whether shape_ is matrix_ with its last two dimensions swapped
};

// A tensor that the operation only writes. `set` on a null tensor, an omitted output, has no effect.
class Out : public In {
  public:
    using In::In;
    void set(const at::Tensor& value) const;  // casts, broadcasts and converts to the tensor's format
    void describe(std::vector<Operand>& operands) const { In::describe(operands, Access::write); }
};

// A tensor that the operation reads and writes.
class InOut : public Out {
  public:
    using Out::Out;
    void describe(std::vector<Operand>& operands) const { In::describe(operands, Access::read_write); }
};

// An output whose shape depends on data, with memory for the largest shape. The caller synchronizes the stream and
// reads the shape with aclGetViewShape. Memory beyond the result is unchanged.
class Resizable : public Out {
  public:
    Resizable(const aclTensor* handle);
    void set(const at::Tensor& value) const;

  private:
    std::shared_ptr<std::optional<std::vector<int64_t>>> result_shape_;
};

// aclScalar, which may be null.
struct Number {
    using Handle = const aclScalar*;
    Number(const aclScalar* handle) {
        if (handle) value = handle->value;
    }
    operator at::Scalar() const { return value.value(); }
    std::optional<at::Scalar> value;
};

// aclIntArray, aclFloatArray and aclBoolArray, which may be null.
template <class Array, class T>
struct Values {
    using Handle = const Array*;
    Values(const Array* handle) : present(handle != nullptr) {
        if (handle) values = handle->values;
    }
    explicit operator bool() const { return present; }
    size_t size() const { return values.size(); }
    T operator[](size_t index) const { return values.at(index); }
    bool present;
    std::vector<T> values;
};
using Ints = Values<aclIntArray, int64_t>;
using Floats = Values<aclFloatArray, float>;
using Bools = Values<aclBoolArray, bool>;

// A C string, which may be null.
struct Text {
    using Handle = const char*;
    Text(const char* handle) : value(handle ? handle : "") {}
    std::string value;
};

// aclTensorList, which may be null.
template <class Argument>
struct List {
    using Handle = const aclTensorList*;
    List(const aclTensorList* handle) : present(handle != nullptr) {
        if (handle)
            for (auto* each : handle->tensors) items.emplace_back(each);
    }
    explicit operator bool() const { return present; }
    size_t size() const { return items.size(); }
    const Argument& operator[](size_t index) const { return items.at(index); }
    std::vector<at::Tensor> tensors() const { return {items.begin(), items.end()}; }
    void describe(std::vector<Operand>& operands) const {
        for (auto& each : items) each.describe(operands);
    }
    bool present;
    std::vector<Argument> items;
};
using Ins = List<In>;
using Outs = List<Out>;
using InOuts = List<InOut>;

// The type of an argument in the C interface: its handle, or, for numbers, its own type.
template <class T>
struct Crossing {
    using Type = T;
};
template <class T>
    requires requires { typename T::Handle; }
struct Crossing<T> {
    using Type = typename T::Handle;
};

template <class T>
void describe(std::vector<Operand>& operands, const T& argument) {
    if constexpr (requires { argument.describe(operands); }) argument.describe(operands);
}

// Optional properties of an operation.
template <class... Arguments>
struct Options {
    void (*check)(Arguments...) = nullptr;    // throws Refused
    double (*flops)(Arguments...) = nullptr;  // operations of one launch, for traces
    uint64_t workspace = 0;  // bytes; the emulator uses none, but a size exercises the caller's workspace handling
};

// Runs `bind`, and converts its exceptions to an error code and a recorded reason.
int prepare(const char* kernel, uint64_t* workspace, aclOpExecutor** executor,
            c10::function_ref<void(aclOpExecutor&)> bind);
// Runs the body of a kernel. Throws std::runtime_error, which becomes a device error.
void run_body(c10::function_ref<void()> body);
// The second phase of every operation.
int execute(aclOpExecutor* executor, aclrtStream stream);

// Checks bound arguments, and returns a launch that describes them.
template <class... Arguments>
Launch describe_launch(const char* kernel, const Options<Arguments...>& options,
                       const std::tuple<Arguments...>& bound) {
    if (options.check) std::apply(options.check, bound);
    Launch launch{.kernel = kernel};
    std::apply([&](auto&... each) { (describe(launch.operands, each), ...); }, bound);
    if (options.flops) launch.flops = std::apply(options.flops, bound);
    return launch;
}

// The first phase. Outside Entry, so that functions with the same parameters share the instantiation.
template <class... Arguments>
int get_workspace_size(const char* kernel, void (*function)(Arguments...), const Options<Arguments...>& options,
                       typename Crossing<Arguments>::Type... handles, uint64_t* workspace, aclOpExecutor** executor) {
    int code = prepare(kernel, workspace, executor, [&](aclOpExecutor& made) {
        std::shared_ptr<const std::tuple<Arguments...>> bound(new std::tuple<Arguments...>{Arguments(handles)...});
        made.launch = describe_launch(kernel, options, *bound);
        made.launch.run = [function, bound] { run_body([&] { std::apply(function, *bound); }); };
    });
    if (code == 0) *workspace = options.workspace;
    return code;
}

template <auto function>
struct Entry;
template <class... Arguments, void (*function)(Arguments...)>
struct Entry<function> {
    static inline const char* kernel = nullptr;
    static inline Options<Arguments...> options;
    static int get_workspace_size(typename Crossing<Arguments>::Type... handles, uint64_t* workspace,
                                  aclOpExecutor** executor) {
        return emulator::get_workspace_size<Arguments...>(kernel, function, options, handles..., workspace, executor);
    }
};

}  // namespace emulator

// An assembler alias gives the deduced function its C name, because a C declaration would have to repeat every
// parameter. GCC for Arm takes no address as "i" in position-independent code.
#define ACLNN(name, ...)                                                                                             \
    [[gnu::constructor]] static void name_##name() {                                                                 \
        emulator::Entry<&name>::kernel = #name;                                                                      \
        emulator::Entry<&name>::options = {__VA_ARGS__};                                                             \
    }                                                                                                                \
    [[gnu::used, gnu::noinline, gnu::noclone]] static void export_##name() {                                         \
        asm volatile(".globl aclnn" #name                                                                            \
                     "GetWorkspaceSize\n"                                                                            \
                     ".type aclnn" #name                                                                             \
                     "GetWorkspaceSize, @function\n"                                                                 \
                     ".set aclnn" #name "GetWorkspaceSize, %c0" ::"X"(&emulator::Entry<&name>::get_workspace_size)); \
    }                                                                                                                \
    extern "C" int aclnn##name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {                       \
        return emulator::execute(executor, stream);                                                                  \
    }
