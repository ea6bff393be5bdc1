// Operations that compute and communicate in one launch, which CANN calls MC2. Their functions describe a collective:
//
//     Fused MatmulAllReduce(In x1, ..., Text group, ..., Out out) { return all_reduce(...); }
//     ACLNN(MatmulAllReduce, .check = check_product, .flops = count_product)
//
// The first phase finds the communicator by its name on the current device, and calls the function. The functions of
// the collective run on the stream, again at every replay.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "hccl/collective.h"
#include "hccl/data_types.h"
#include "numeric.h"

namespace emulator {

struct Fused {
    CommunicatorPointer communicator = nullptr;  // null for a call that neither computes nor communicates
    Collective collective = {};
};

// Returns how the second phase launches it.
std::function<int(aclrtStream, Launch)> submission(const char* kernel, Fused fused);

template <class... Arguments, Fused (*function)(Arguments...)>
struct Entry<function> {
    static inline const char* kernel = nullptr;
    static inline Options<Arguments...> options;
    static int get_workspace_size(typename Crossing<Arguments>::Type... handles, uint64_t* workspace,
                                  aclOpExecutor** executor) {
        int code = prepare(kernel, workspace, executor, [&](aclOpExecutor& made) {
            std::tuple<Arguments...> bound{Arguments(handles)...};
            made.launch = describe_launch(kernel, options, bound);
            made.submit = submission(kernel, std::apply(function, bound));
        });
        if (code == 0) *workspace = options.workspace;
        return code;
    }
};

// Hardware uses a workspace, so callers must allocate one. The emulator does not.
constexpr uint64_t kFusedWorkspace = 1024;

inline void require_tiling(bool condition, const std::string& reason) {
    if (!condition) throw TilingRefused(reason);
}

// Refuses an operation that the documents do not list for this generation.
void require_product(const char* name, std::initializer_list<Product> allowed);

// Returns the communicator of a name on the current device. Throws TilingRefused if there is none, or if it is in use
// for other operations.
CommunicatorPointer find_group(const Text& group, Communicator::Use use = Communicator::Use::collectives);
// Refuses a group whose number of ranks the documents do not list.
void require_ranks(const Communicator& communicator, std::initializer_list<uint32_t> allowed);

// Returns a collective whose ranks must give the same number of elements of a dtype.
Collective collective_of(at::ScalarType dtype, uint64_t count, bool is_sum);
// Sets the bytes of this rank's data.
void set_bytes(Collective& collective, size_t bytes);

// A number that all ranks must give alike.
struct Agreed {
    const char* name;
    int64_t value;
};
// Makes different numbers an error on all ranks.
void require_agreement(Collective& collective, const std::vector<Agreed>& numbers);
// Returns the first difference, or an empty string. For a mismatch function with further conditions.
std::string find_disagreement(const Turn& turn, const std::vector<Agreed>& numbers);

// Data in a slot as a tensor.
at::Tensor in_slot(char* data, at::IntArrayRef shape, at::ScalarType dtype);
// Returns the sum over all ranks of the elements from `first` on of their data, as an all-reduce computes it.
at::Tensor sum_of_ranks(const Turn& turn, int64_t first, at::IntArrayRef shape, at::ScalarType dtype);

inline int64_t elements_of(const In& tensor) { return c10::multiply_integers(tensor.sizes()); }
inline bool is_empty(const In& tensor) { return elements_of(tensor) == 0; }
// An optional tensor that torch_npu passes as null or with the shape [0].
inline bool is_given(const In& tensor) { return tensor && tensor.sizes() != at::IntArrayRef{0}; }

}  // namespace emulator
