// Matrix products with quantized weights, and batched products with transposed operands.
#include "quantize.h"

namespace {

using namespace emulator;



// Returns the weights as float32 [K, N].
at::Tensor weights(const In& weight) {
    auto values = weight.tensor();
    if (values.scalar_type() != at::kInt) return values.to(at::kFloat);
    return is_transposed(weight) ? unpack_int4(values.t()).t() : unpack_int4(values);
}

// Broadcasts factors to the weights: one for all, one for each column, or one for each column of each group of rows.
at::Tensor expand_factors(const In& factors, int64_t rows, int64_t group_size) {
    auto values = factors.tensor().to(at::kFloat);
    if (group_size == 0) return values.dim() == 2 && values.size(0) != 1 ? values.t() : values;
    return values.repeat_interleave(group_size, 0).narrow(0, 0, rows);
}

DOCUMENTED(
    "ops-nn: matmul/weight_quant_batch_matmul_v2/docs/aclnnWeightQuantBatchMatmulV2.md"
    "; ops-nn: matmul/weight_quant_batch_matmul_v2/docs/aclnnWeightQuantBatchMatmulV3.md");
void check_weight_product(In x, In weight, In scale, In offset, In quant_scale, In quant_offset, In bias,
                          int32_t group_size, Out) {
    if (x.dtype() != at::kHalf && x.dtype() != at::kBFloat16)
        throw Refused(std::string("x must be float16 or bfloat16, not ") + c10::toString(x.dtype()));
    if (weight.dtype() != at::kChar && weight.dtype() != at::kInt)
        throw Refused(std::string("weight must be int8, or int4 in int32, not ") + c10::toString(weight.dtype()));
    if (x.dim() != 2 || weight.dim() != 2)
        throw Refused("x and weight must have 2 dimensions, not " + number(x.dim()) + " and " + number(weight.dim()));
    if (scale.dtype() == at::kLong || scale.dtype() == at::kUInt64)
        throw NotEmulated("an int64 antiquant_scale is not emulated");
    if (scale.dtype() != x.dtype())
        throw Refused("antiquant_scale must have x's dtype, " + c10::str(x.dtype(), ", not ", scale.dtype()));
    if (offset && (offset.dtype() != scale.dtype() || offset.sizes() != scale.sizes()))
        throw Refused("antiquant_offset must have the shape and dtype of antiquant_scale, " +
                      c10::str(scale.dtype(), " of shape ", scale.sizes(), ", not ", offset.dtype(), " of shape ",
                               offset.sizes()));
    if (quant_scale || quant_offset)
        throw NotEmulated("a quantized output (quant_scale, quant_offset) is not emulated");
    bool int4 = weight.dtype() == at::kInt;
    int64_t inner = weight.size(0) * (int4 && is_transposed(weight) ? 8 : 1),
            columns = weight.size(1) * (int4 && !is_transposed(weight) ? 8 : 1);
    if (x.size(1) != inner)
        throw Refused("x must have as many columns as weight has rows, " + number(inner) + ", but has " +
                      number(x.size(1)));
    if (group_size && (group_size < 32 || group_size % 32 || group_size > inner - 1))
        throw Refused("antiquant_group_size must be 0, or a multiple of 32 below K = " + number(inner) + ", but is " +
                      number(group_size));
    int64_t rows = group_size ? (inner + group_size - 1) / group_size : 1, count = 1;
    for (auto size : scale.sizes()) count *= size;
    if (count != rows * columns && (group_size || count != 1))
        throw Refused("antiquant_scale must have " + (group_size ? "" : std::string("1 or ")) + number(rows * columns) +
                      " elements, but has " + number(count));
    if (bias && bias.size(-1) != columns)
        throw Refused("the last dimension of bias must be N = " + number(columns) + ", but is " +
                      number(bias.size(-1)));
}

double count_weight_product(In x, In, In, In, In, In, In, int32_t, Out y) {
    return 2.0 * x.size(0) * x.size(1) * y.size(-1);
}

void WeightQuantBatchMatmulV2(In x, In weight, In scale, In offset, In quant_scale, In quant_offset, In bias,
                              int32_t group_size, Out y) {
    auto values = weights(weight);
    if (offset) values = values + expand_factors(offset, values.size(0), group_size);
    auto product = at::matmul(x.tensor().to(at::kFloat), values * expand_factors(scale, values.size(0), group_size));
    if (bias) product = product + bias.tensor().to(at::kFloat);
    y.set(product);
}

void check_weight_product_v3(In x, In weight, In scale, In offset, In quant_scale, In quant_offset, In bias,
                             int32_t group_size, int32_t inner_precise, Out y) {
    check_weight_product(x, weight, scale, offset, quant_scale, quant_offset, bias, group_size, y);
}
double count_weight_product_v3(In x, In, In, In, In, In, In, int32_t, int32_t, Out y) {
    return 2.0 * x.size(0) * x.size(1) * y.size(-1);
}
void WeightQuantBatchMatmulV3(In x, In weight, In scale, In offset, In quant_scale, In quant_offset, In bias,
                              int32_t group_size, int32_t inner_precise, Out y) {
    WeightQuantBatchMatmulV2(x, weight, scale, offset, quant_scale, quant_offset, bias, group_size, y);
}

bool is_order(const Ints& order, std::initializer_list<int64_t> expected) {
    return order.values == std::vector<int64_t>(expected);
}

DOCUMENTED("ops-nn: matmul/transpose_batch_mat_mul/docs/aclnnTransposeBatchMatMul.md");
void check_batches(In x1, In x2, In bias, In scale, Ints order1, Ints order2, Ints order_y, int8_t, int32_t split,
                   Out) {
    if (x1.dim() != 3 || x2.dim() != 3)
        throw Refused("x1 and x2 must have 3 dimensions, not " + number(x1.dim()) + " and " + number(x2.dim()));
    if (bias) throw Refused("bias is reserved and must be omitted");
    if (scale) throw NotEmulated("a quantized output (scale) is not emulated");
    if (!is_order(order1, {0, 1, 2}) && !is_order(order1, {1, 0, 2}))
        throw Refused("perm_x1 must be [0, 1, 2] or [1, 0, 2], not " + c10::str(at::IntArrayRef(order1.values)));
    if (!is_order(order2, {0, 1, 2}) && !is_order(order2, {0, 2, 1}))
        throw Refused("perm_x2 must be [0, 1, 2] or [0, 2, 1], not " + c10::str(at::IntArrayRef(order2.values)));
    if (!is_order(order_y, {1, 0, 2}))
        throw Refused("perm_y must be [1, 0, 2], not " + c10::str(at::IntArrayRef(order_y.values)));
    if (x1.dtype() != x2.dtype())
        throw Refused("x1 and x2 must have the same dtype, but are " + c10::str(x1.dtype(), " and ", x2.dtype()));
    int64_t batch = x1.size(order1[0]), columns = x2.size(order2[2]);
    if (x2.size(0) != batch || x1.size(order1[2]) != x2.size(order2[1]))
        throw Refused("x1 and x2 must have the same batch size and inner dimension, but have shapes " +
                      c10::str(x1.sizes(), " and ", x2.sizes()));
    if (batch >= 65536 || columns >= 65536)
        throw Refused("B and N must be less than 65536, but are " + number(batch) + " and " + number(columns));
    if (split < 1 || batch % split)
        throw Refused("batch_split_factor must be positive and divide the batch size, " + number(batch) + ", but is " +
                      number(split));
    if (is_order(order2, {0, 2, 1}) && (split != 1 || !is_order(order1, {1, 0, 2})))
        throw Refused("perm_x2 [0, 2, 1] requires perm_x1 [1, 0, 2] and batch_split_factor 1");
}

double count_batches(In x1, In x2, In, In, Ints, Ints order2, Ints, int8_t, int32_t, Out) {
    return 2.0 * x1.size(0) * x1.size(1) * x1.size(2) * x2.size(order2[2]);
}

void TransposeBatchMatMul(In x1, In x2, In bias, In scale, Ints order1, Ints order2, Ints order_y,
                          int8_t cube_math_type, int32_t split, Out y) {
    auto product =
        at::bmm(x1.tensor().permute(order1.values), x2.tensor().permute(order2.values)).transpose(0, 1);  // [M, B, N]
    if (split > 1) product = product.unflatten(1, {split, -1}).flatten(2).transpose(0, 1);
    y.set(product);
}

void TransposeBatchMatMulWeightNz(In x1, In x2, In bias, In scale, Ints order1, Ints order2, Ints order_y,
                                  int8_t cube_math_type, int32_t split, Out y) {
    TransposeBatchMatMul(x1, x2, bias, scale, order1, order2, order_y, cube_math_type, split, y);
}

}  // namespace

ACLNN(WeightQuantBatchMatmulV2, .check = check_weight_product, .flops = count_weight_product)
ACLNN(WeightQuantBatchMatmulV3, .check = check_weight_product_v3, .flops = count_weight_product_v3)
ACLNN(TransposeBatchMatMul, .check = check_batches, .flops = count_batches)
ACLNN(TransposeBatchMatMulWeightNz, .check = check_batches, .flops = count_batches)
