// The handles that callers of aclnn create: aclTensor, aclScalar, aclIntArray and others. They own no tensor data.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "acl/acl_base.h"

struct aclTensor {
    std::vector<int64_t> shape, strides;  // of the view, in elements
    int64_t offset = 0;                   // of the view into the storage, in elements
    std::vector<int64_t> storage_shape;   // of the storage; in FRACTAL_NZ the fractal dimensions
    aclDataType dtype = ACL_DT_UNDEFINED;
    aclFormat format = ACL_FORMAT_ND;
    void* storage = nullptr;  // a device address
    // The shape of a result that depends on data, once the operation has run. Shared with the launch, which may outlive
    // this handle.
    mutable std::shared_ptr<std::optional<std::vector<int64_t>>> result_shape = nullptr;
};
struct aclScalar {
    at::Scalar value;
    aclDataType dtype;
};
struct aclIntArray {
    std::vector<int64_t> values;
};
struct aclFloatArray {
    std::vector<float> values;
};
struct aclBoolArray {
    std::vector<bool> values;
};
struct aclTensorList {
    std::vector<const aclTensor*> tensors;
};
struct aclScalarList {
    std::vector<const aclScalar*> scalars;
};

namespace emulator {

// Throw Refused for a type that the other side does not have.
at::ScalarType scalar_type(aclDataType dtype);
aclDataType acl_type(at::ScalarType dtype);

}  // namespace emulator
