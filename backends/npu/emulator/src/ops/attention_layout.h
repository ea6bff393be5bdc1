// How fused attention's arguments lie in memory: the layouts of query and output, the lengths of its sequences, and the
// paged caches.
#pragma once

#include <string>
#include <vector>

#include "op.h"

namespace emulator {

// "BSND_NBSD" takes a query in BSND and writes its output in NBSD.
struct AttentionLayout {
    explicit AttentionLayout(const std::string& name);  // throws Refused
    std::string input, output;
    bool packed;  // sequences one after another along T, whatever their lengths
};

// The same memory as [B, N, S, D], or as [N, T, D] where the layout packs.
at::Tensor by_heads(const at::Tensor& tensor, const std::string& layout, int64_t heads);

// Rows of one sequence: of the S axis, or of T.
struct Span {
    int64_t start, length;
};

// The lengths given for a batch, each of at most `rows`; all of `rows` where none is given.
std::vector<Span> dense_spans(const Ints& lengths, int64_t batch, int64_t rows, const char* what);
// Each entry is where a sequence ends.
std::vector<Span> packed_spans(const Ints& ends, int64_t rows, const char* what);

// Keys or values in blocks: [blocks, block_size, H], [blocks, N, block_size, D], or in fractals
// [blocks, N, D / C0, block_size, C0].
struct PagedCache {
    int64_t heads, dim, blocks, block_size;
};
PagedCache paged_cache(const In& cache, int64_t kv_heads);  // throws Refused
// The first `length` rows of a sequence whose blocks are `block_row`: [N, length, D].
at::Tensor gather_blocks(const at::Tensor& cache, const at::Tensor& block_row, int64_t kv_heads, int64_t block_size,
                         int64_t length);

}  // namespace emulator
