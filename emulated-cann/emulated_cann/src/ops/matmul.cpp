// Matrix products. The cube unit accumulates in float32 and rounds once for all input dtypes.
#include "numeric.h"
#include "product.h"

using namespace emulator;

DOCUMENTED("ops-nn: matmul (the page of each operation)");

static double product_flops(const In& self, const In& other, const Out& out) {
    if (self.dim() == 0 || other.dim() == 0) return 0;
    double elements = 1;
    for (auto size : out.sizes()) elements *= size;
    return 2 * elements * self.size(-1);
}

static void check_dtype(const In& tensor, const char* name) {
    require_dtype(tensor, {at::kFloat, at::kHalf, at::kBFloat16}, name);
}

// Returns the shape of torch.matmul(self, other).
static std::vector<int64_t> product_shape(const In& self, const In& other) {
    require(self.dim() > 0 && other.dim() > 0, "self and mat2 must have at least one dimension, but have shapes " +
                                                   shown(self.sizes()) + " and " + shown(other.sizes()));
    auto left = self.sizes().vec(), right = other.sizes().vec();
    bool vector_left = left.size() == 1, vector_right = right.size() == 1;
    if (vector_left) left.insert(left.begin(), 1);
    if (vector_right) right.push_back(1);
    require(left.back() == right[right.size() - 2],
            "shapes " + shown(self.sizes()) + " and " + shown(other.sizes()) + " cannot be multiplied");
    int64_t rows = left[left.size() - 2], columns = right.back();
    auto shape =
        broadcast(at::IntArrayRef(left).slice(0, left.size() - 2), at::IntArrayRef(right).slice(0, right.size() - 2));
    if (!vector_left) shape.push_back(rows);
    if (!vector_right) shape.push_back(columns);
    return shape;
}

static void check_product(const In& self, const In& other, const Out& out) {
    check_dtype(self, "self");
    check_dtype(other, "mat2");
    require_shape(out, product_shape(self, other), "out");
}

// Returns self @ other in the dtype of accumulation.
static at::Tensor product(const In& self, const In& other) { return wide_product(self, other); }

#define PRODUCT(name, left_dims, right_dims)                                                                   \
    static void check_##name(In self, In other, Out out, int8_t) {                                             \
        require((left_dims) == 0 || (self.dim() == (left_dims) && other.dim() == (right_dims)),                \
                "self and mat2 must have " #left_dims " and " #right_dims " dimensions, but have shapes " +    \
                    shown(self.sizes()) + " and " + shown(other.sizes()));                                     \
        check_product(self, other, out);                                                                       \
    }                                                                                                          \
    static double flops_##name(In self, In other, Out out, int8_t) { return product_flops(self, other, out); } \
    static void name(In self, In other, Out out, int8_t) { out.set(product(self, other)); }                    \
    ACLNN(name, .check = check_##name, .flops = flops_##name, .workspace = kWorkspace)

PRODUCT(Mm, 2, 2)
PRODUCT(Mv, 2, 1)
PRODUCT(BatchMatMul, 3, 3)
PRODUCT(BatchMatMulWeightNz, 3, 3)
PRODUCT(Matmul, 0, 0)
PRODUCT(MatmulWeightNz, 0, 0)

static void Dot(In self, In other, Out out) { out.set(at::dot(widen(self), widen(other))); }
ACLNN(Dot, .check = real_first)

// Returns beta * self + alpha * product. With beta 0 it ignores self, which may hold NaN.
static at::Tensor add_product(const In& self, const at::Tensor& product, const Number& beta, const Number& alpha) {
    auto in_dtype = [&](const Number& factor) {  // integers have integer factors
        return product.is_floating_point() || product.is_complex() ? *factor.value : at::Scalar(factor.value->toLong());
    };
    auto first = in_dtype(alpha), second = in_dtype(beta);
    auto scaled = first.equal(1) ? product : at::mul(product, first);
    return second.equal(0) ? scaled : at::add(scaled, widen(self), second);
}

static void check_sum(const In& self, const In& mat1, const In& mat2, const Out& out, int64_t dims) {
    require(mat1.dim() == dims && mat2.dim() == dims, "mat1 and mat2 must have " + std::to_string(dims) +
                                                          " dimensions, but have shapes " + shown(mat1.sizes()) +
                                                          " and " + shown(mat2.sizes()));
    check_product(mat1, mat2, out);
    check_dtype(self, "self");
    require_shape(out, broadcast(self.sizes(), out.sizes()), "out");
}

#define SUM(name, dims)                                                                          \
    static void check_##name(In self, In mat1, In mat2, Number, Number, Out out, int8_t) {       \
        check_sum(self, mat1, mat2, out, dims);                                                  \
    }                                                                                            \
    static double flops_##name(In, In mat1, In mat2, Number, Number, Out out, int8_t) {          \
        return product_flops(mat1, mat2, out);                                                   \
    }                                                                                            \
    static void name(In self, In mat1, In mat2, Number beta, Number alpha, Out out, int8_t) {    \
        out.set(add_product(self, product(mat1, mat2), beta, alpha));                            \
    }                                                                                            \
    ACLNN(name, .check = check_##name, .flops = flops_##name, .workspace = kWorkspace)           \
    static void check_Inplace##name(InOut self, In mat1, In mat2, Number, Number, int8_t) {      \
        check_sum(self, mat1, mat2, self, dims);                                                 \
    }                                                                                            \
    static double flops_Inplace##name(InOut self, In mat1, In mat2, Number, Number, int8_t) {    \
        return product_flops(mat1, mat2, self);                                                  \
    }                                                                                            \
    static void Inplace##name(InOut self, In mat1, In mat2, Number beta, Number alpha, int8_t) { \
        self.set(add_product(self, product(mat1, mat2), beta, alpha));                           \
    }                                                                                            \
    ACLNN(Inplace##name, .check = check_Inplace##name, .flops = flops_Inplace##name)

SUM(Addmm, 2)
SUM(AddmmWeightNz, 2)
SUM(Baddbmm, 3)

static void Addbmm(In self, In batch1, In batch2, Number beta, Number alpha, Out out, int8_t) {
    out.set(add_product(self, product(batch1, batch2).sum(0), beta, alpha));
}
ACLNN(Addbmm)
static void Addmv(In self, In mat, In vec, Number alpha, Number beta, Out out, int8_t) {
    out.set(add_product(self, product(mat, vec), beta, alpha));
}
ACLNN(Addmv)
static void Addr(In self, In vec1, In vec2, Number beta, Number alpha, Out out) {
    out.set(add_product(self, at::outer(widen(vec1), widen(vec2)), beta, alpha));
}
ACLNN(Addr)
static void InplaceAddr(InOut self, In vec1, In vec2, Number beta, Number alpha) {
    self.set(add_product(self, at::outer(widen(vec1), widen(vec2)), beta, alpha));
}
ACLNN(InplaceAddr)
