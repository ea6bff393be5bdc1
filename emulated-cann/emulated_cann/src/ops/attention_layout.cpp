#include "attention_layout.h"

#include <array>

namespace emulator {

namespace {

constexpr std::array kLayouts = {"BSH",       "BSND",    "BNSD",     "TND",       "NTD",       "BNSD_BSND", "BSH_BNSD",
                                 "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"};

std::string listed(at::IntArrayRef shape) {
    std::string out = "[";
    for (size_t d = 0; d < shape.size(); ++d) out += (d ? ", " : "") + std::to_string(shape[d]);
    return out + "]";
}

}  // namespace

DOCUMENTED(
    "ops-transformer: attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV4.md"
    "; ops-transformer: attention/incre_flash_attention/docs/aclnnIncreFlashAttentionV4.md"
    "; ops-transformer: attention/prompt_flash_attention/docs/aclnnPromptFlashAttentionV3.md");
AttentionLayout::AttentionLayout(const std::string& name) {
    if (std::find(kLayouts.begin(), kLayouts.end(), name) == kLayouts.end())
        throw Refused("input_layout must be BSH, BSND, BNSD, TND, NTD or one of their combinations, not '" + name +
                      "'");
    auto underscore = name.find('_');
    input = name.substr(0, underscore);
    output = underscore == std::string::npos ? input : name.substr(underscore + 1);
    packed = input == "TND" || input == "NTD";
}

at::Tensor by_heads(const at::Tensor& tensor, const std::string& layout, int64_t heads) {
    if (layout == "BSH") return tensor.unflatten(2, {heads, tensor.size(2) / heads}).permute({0, 2, 1, 3});
    if (layout == "SBH") return tensor.unflatten(2, {heads, tensor.size(2) / heads}).permute({1, 2, 0, 3});
    if (layout == "BSND") return tensor.permute({0, 2, 1, 3});
    if (layout == "NBSD") return tensor.permute({1, 0, 2, 3});
    if (layout == "TND") return tensor.permute({1, 0, 2});
    return tensor;  // BNSD, NTD
}

std::vector<Span> dense_spans(const Ints& lengths, int64_t batch, int64_t rows, const char* what) {
    if (!lengths || lengths.size() == 0) return std::vector<Span>(batch, Span{0, rows});
    if (lengths.size() != 1 && static_cast<int64_t>(lengths.size()) < batch)
        throw Refused(std::string(what) + " must have 1 entry or one for each of the " + std::to_string(batch) +
                      " sequences, but has " + std::to_string(lengths.size()));
    std::vector<Span> spans;
    for (int64_t b = 0; b < batch; ++b) {
        int64_t length = lengths[lengths.size() == 1 ? 0 : b];
        if (length < 0 || length > rows)
            throw Refused(std::string(what) + "[" + std::to_string(b) + "] is " + std::to_string(length) +
                          ", but must be between 0 and " + std::to_string(rows));
        spans.push_back({0, length});
    }
    return spans;
}

std::vector<Span> packed_spans(const Ints& ends, int64_t rows, const char* what) {
    if (!ends || ends.size() == 0) throw Refused(std::string("a TND layout requires ") + what);
    if (ends.size() > 4096)
        throw Refused(std::string(what) + " of a TND layout must have at most 4096 entries, but has " +
                      std::to_string(ends.size()));
    std::vector<Span> spans;
    int64_t start = 0;
    for (auto end : ends.values) {
        if (end < start)
            throw Refused(std::string(what) + " of a TND layout must be cumulative, but " + std::to_string(end) +
                          " follows " + std::to_string(start));
        spans.push_back({start, end - start});
        start = end;
    }
    if (start != rows)
        throw Refused(std::string(what) + " of a TND layout must end with T = " + std::to_string(rows) +
                      ", but ends with " + std::to_string(start));
    return spans;
}

PagedCache paged_cache(const In& cache, int64_t kv_heads) {
    auto shape = cache.sizes();
    PagedCache paged{.heads = kv_heads, .dim = 0, .blocks = shape.empty() ? 0 : shape[0], .block_size = 0};
    if (shape.size() == 3 && shape[2] % kv_heads == 0) {
        paged.block_size = shape[1], paged.dim = shape[2] / kv_heads;
    } else if (shape.size() == 4 && shape[1] == kv_heads) {
        paged.block_size = shape[2], paged.dim = shape[3];
    } else if (shape.size() == 5 && shape[1] == kv_heads) {
        paged.block_size = shape[3], paged.dim = shape[2] * shape[4];
        int64_t fractal = 32 / static_cast<int64_t>(c10::elementSize(cache.dtype()));
        if (shape[4] != fractal)
            throw Refused("the last dimension of a paged cache in FRACTAL_NZ must be " + std::to_string(fractal) +
                          ", but is " + std::to_string(shape[4]));
    } else {
        throw Refused(
            "a paged cache must have shape [blocks, block_size, H], [blocks, N, block_size, D] or [blocks, N, D/C0, "
            "block_size, C0] with N = " +
            std::to_string(kv_heads) + ", not " + listed(shape));
    }
    return paged;
}

at::Tensor gather_blocks(const at::Tensor& cache, const at::Tensor& block_row, int64_t kv_heads, int64_t block_size,
                         int64_t length) {
    auto blocks = block_row.narrow(0, 0, (length + block_size - 1) / block_size).to(at::kLong);
    auto [least, most] = at::aminmax(blocks);
    UNDEFINED("a kernel would read outside the cache");
    if (least.item<int64_t>() < 0 || most.item<int64_t>() >= cache.size(0))
        throw std::runtime_error(
            "the block numbers in block_table must be between 0 and " + std::to_string(cache.size(0) - 1) +
            ", but one is " + std::to_string(least.item<int64_t>() < 0 ? least.item<int64_t>() : most.item<int64_t>()));
    auto gathered = cache.index_select(0, blocks);
    if (cache.dim() == 3) {
        gathered = gathered.view({-1, kv_heads, cache.size(2) / kv_heads}).transpose(0, 1);
    } else if (cache.dim() == 4) {
        gathered = gathered.transpose(0, 1).reshape({kv_heads, -1, cache.size(3)});
    } else {  // [n, N, D / C0, block, C0] to [N, n * block, D]
        gathered = gathered.permute({1, 0, 3, 2, 4}).reshape({kv_heads, -1, cache.size(2) * cache.size(4)});
    }
    return gathered.narrow(1, 0, length);
}

}  // namespace emulator
