// Queries and keys of sparse attention, as the operations on them take them.
#pragma once

#include <functional>
#include <string>

#include "attention_core.h"
#include "attention_layout.h"

namespace emulator {

// The queries and keys of a batch. Lengths are on the device.
struct Sparse {
    In query, key, table, query_lengths, key_lengths;
    std::string query_layout, key_layout;
    bool packed() const { return query_layout == "TND"; }
    bool paged() const { return key_layout == "PA_BSND"; }
    int64_t heads() const { return query.size(-2); }
    int64_t batch() const { return packed() ? query_lengths.size(0) : query.size(0); }
};

// Throws Refused unless the layouts, shapes and lengths fit each other.
void check_sparse(const Sparse& call, int64_t query_dim, int64_t key_dim, int64_t mode, int64_t before, int64_t after);
void check_indices(const Sparse& call, const In& indices);

// A sequence's part of a tensor of the queries' layout, [queries, ...], and its rows of a tensor of the keys' layout.
struct Sequence {
    Sequence(const Sparse& call, int64_t row);
    at::Tensor of_queries(const at::Tensor& tensor) const;
    at::Tensor of_keys(const at::Tensor& tensor) const;  // without the dimension of the key's only head
    const Sparse& call;
    int64_t row;
    Span queries, keys;
};

// Writes the positions of the `count` largest scores [queries, keys] to sparse_indices, the largest first, then -1.
// Of equal scores, the lower position comes first; the document does not say which. `best` may be null.
void choose(const Sequence& sequence, const at::Tensor& scores, int64_t count, int64_t mode, const Out& indices,
            const Out* best);

// Attends to the chosen positions of a sequence, and calls `store` with each query's number and result.
void attend_to_chosen(const Sequence& sequence, const at::Tensor& queries, const at::Tensor& keys,
                      const at::Tensor& values, const In& indices, int64_t mode, double scale,
                      const std::function<void(int64_t, const AttentionResult&)>& store);

}  // namespace emulator
