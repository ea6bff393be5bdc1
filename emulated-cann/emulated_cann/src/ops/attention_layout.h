// Memory layouts of fused attention: of query and output, of sequences in a batch, and of paged caches.
#pragma once

#include <string>
#include <vector>

#include "op.h"

namespace emulator {

// The layouts of input and output. "BSND_NBSD" means a query in BSND and an output in NBSD.
struct AttentionLayout {
    explicit AttentionLayout(const std::string& name);  // throws Refused
    std::string input, output;
    bool packed;  // sequences of any lengths are concatenated along T
};

// Returns a view as [B, N, S, D], or as [N, T, D] for a packed layout.
at::Tensor by_heads(const at::Tensor& tensor, const std::string& layout, int64_t heads);

// The rows of one sequence along S, or along T in a packed layout.
struct Span {
    int64_t start, length;
};

// Returns the spans for the given lengths, each at most `rows`. Without lengths each span has `rows` rows.
std::vector<Span> dense_spans(const Ints& lengths, int64_t batch, int64_t rows, const char* what);
// Returns the spans for the given end positions.
std::vector<Span> packed_spans(const Ints& ends, int64_t rows, const char* what);

// A paged key or value cache: [blocks, block_size, H], [blocks, N, block_size, D], or in FRACTAL_NZ [blocks, N, D / C0,
// block_size, C0].
struct PagedCache {
    int64_t heads, dim, blocks, block_size;
};
PagedCache paged_cache(const In& cache, int64_t kv_heads);  // throws Refused
// Returns the first `length` rows of the sequence with the blocks `block_row`: [N, length, D].
at::Tensor gather_blocks(const at::Tensor& cache, const at::Tensor& block_row, int64_t kv_heads, int64_t block_size,
                         int64_t length);

}  // namespace emulator
