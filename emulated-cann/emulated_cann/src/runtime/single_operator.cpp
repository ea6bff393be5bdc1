// The single-operator interface (aclop). Its descriptions of tensors, buffers and attributes are emulated, because
// torch_npu creates and destroys them around every call, also one that fails. Its operations are not emulated.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "runtime/errors.h"

using namespace emulator;

struct aclTensorDesc {
    aclDataType dtype;
    aclFormat format;
    std::vector<int64_t> shape;
    std::string name;
    // Where the data is. Only an operator compiler reads it, and there is none.
    aclMemType place = ACL_MEMTYPE_DEVICE;
};
struct aclDataBuffer {
    void* data;
    size_t size;
};
struct aclopAttr {};  // no function reads an attribute back

DOCUMENTED("runtime: docs/zh/api_ref/25-01_aclError.md");

namespace {

constexpr int64_t kUnknownDim = -1;

int null_argument(const char* function) {
    return fail(ACL_ERROR_INVALID_PARAM, std::string(function) + ": an argument is null");
}

int set_shape(aclTensorDesc* desc, int dims, const int64_t* sizes, const char* function) {
    if (!desc || dims < 0 || (dims && !sizes)) return null_argument(function);
    desc->shape.assign(sizes, sizes + dims);
    return ACL_SUCCESS;
}

int set_attribute(aclopAttr* attributes, const char* name, const char* function) {
    return attributes && name ? ACL_SUCCESS : null_argument(function);
}

bool is_base(aclFormat format) {
    static const aclFormat base[] = {ACL_FORMAT_UNDEFINED, ACL_FORMAT_ND,    ACL_FORMAT_NCHW,
                                     ACL_FORMAT_NHWC,      ACL_FORMAT_NCDHW, ACL_FORMAT_NCL};
    return std::find(std::begin(base), std::end(base), format) != std::end(base);
}

int refuse(const char* operation, int inputs, const aclTensorDesc* const* descriptions) {
    std::string remedy =
        "torch's function instead of an npu_* one, or another dtype or layout, may make torch_npu call aclnn, which is "
        "emulated";
    for (int i = 0; descriptions && i < inputs; ++i) {
        if (descriptions[i] && !is_base(descriptions[i]->format)) {
            remedy = format(
                "input %d is in format %d; cast it to ND with torch_npu.npu_format_cast(tensor, 2), so that torch_npu "
                "calls aclnn, which is emulated",
                i, static_cast<int>(descriptions[i]->format));
            break;
        }
    }
    OURS("not emulated");
    return fail(ACL_ERROR_OP_NOT_FOUND,
                std::string("torch_npu runs ") + (operation ? operation : "an operation") +
                    " through the single-operator interface (aclop), whose operations are not emulated; " + remedy);
}

}  // namespace

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int dims, const int64_t* sizes, aclFormat format) {
    auto* desc = new aclTensorDesc{dtype, format, {}, {}};
    if (!set_shape(desc, dims, sizes, "aclCreateTensorDesc")) return desc;
    delete desc;
    return nullptr;
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }

aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc ? desc->dtype : ACL_DT_UNDEFINED; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc ? desc->format : ACL_FORMAT_UNDEFINED; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc ? desc->shape.size() : 0; }
size_t aclGetTensorDescElementCount(const aclTensorDesc* desc) {
    if (!desc || std::find(desc->shape.begin(), desc->shape.end(), kUnknownDim) != desc->shape.end()) return 0;
    return std::accumulate(desc->shape.begin(), desc->shape.end(), size_t{1}, std::multiplies<size_t>());
}
int64_t aclGetTensorDescDim(const aclTensorDesc* desc, size_t index) {
    return desc && index < desc->shape.size() ? desc->shape[index] : kUnknownDim;
}
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
    if (!desc || !size) return null_argument("aclGetTensorDescDimV2");
    if (index >= desc->shape.size())
        return fail(
            ACL_ERROR_INVALID_PARAM,
            format("aclGetTensorDescDimV2: the index must be less than the number of dimensions, %zu, but is %zu",
                   desc->shape.size(), index));
    *size = desc->shape[index];
    return ACL_SUCCESS;
}
const char* aclGetTensorDescName(aclTensorDesc* desc) { return desc ? desc->name.c_str() : ""; }
void aclSetTensorDescName(aclTensorDesc* desc, const char* name) {
    if (desc && name) desc->name = name;
}
aclError aclSetTensorShape(aclTensorDesc* desc, int dims, const int64_t* sizes) {
    return set_shape(desc, dims, sizes, "aclSetTensorShape");
}
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
    if (!desc) return null_argument("aclSetTensorFormat");
    desc->format = format;
    return ACL_SUCCESS;
}
aclError aclSetTensorPlaceMent(aclTensorDesc* desc, aclMemType place) {
    if (!desc) return null_argument("aclSetTensorPlaceMent");
    desc->place = place;
    return ACL_SUCCESS;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) { return new aclDataBuffer{data, size}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
    delete buffer;
    return ACL_SUCCESS;
}
aclError aclUpdateDataBuffer(aclDataBuffer* buffer, void* data, size_t size) {
    if (!buffer) return null_argument("aclUpdateDataBuffer");
    *buffer = {data, size};
    return ACL_SUCCESS;
}
void* aclGetDataBufferAddr(const aclDataBuffer* buffer) { return buffer ? buffer->data : nullptr; }
uint32_t aclGetDataBufferSize(const aclDataBuffer* buffer) { return buffer ? static_cast<uint32_t>(buffer->size) : 0; }
size_t aclGetDataBufferSizeV2(const aclDataBuffer* buffer) { return buffer ? buffer->size : 0; }

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }
aclError aclopSetAttrBool(aclopAttr* attributes, const char* name, uint8_t) {
    return set_attribute(attributes, name, "aclopSetAttrBool");
}
aclError aclopSetAttrInt(aclopAttr* attributes, const char* name, int64_t) {
    return set_attribute(attributes, name, "aclopSetAttrInt");
}
aclError aclopSetAttrFloat(aclopAttr* attributes, const char* name, float) {
    return set_attribute(attributes, name, "aclopSetAttrFloat");
}
aclError aclopSetAttrString(aclopAttr* attributes, const char* name, const char*) {
    return set_attribute(attributes, name, "aclopSetAttrString");
}
aclError aclopSetAttrDataType(aclopAttr* attributes, const char* name, aclDataType) {
    return set_attribute(attributes, name, "aclopSetAttrDataType");
}
aclError aclopSetAttrListBool(aclopAttr* attributes, const char* name, int, const uint8_t*) {
    return set_attribute(attributes, name, "aclopSetAttrListBool");
}
aclError aclopSetAttrListInt(aclopAttr* attributes, const char* name, int, const int64_t*) {
    return set_attribute(attributes, name, "aclopSetAttrListInt");
}
aclError aclopSetAttrListFloat(aclopAttr* attributes, const char* name, int, const float*) {
    return set_attribute(attributes, name, "aclopSetAttrListFloat");
}
aclError aclopSetAttrListListInt(aclopAttr* attributes, const char* name, int, const int*, const int64_t* const[]) {
    return set_attribute(attributes, name, "aclopSetAttrListListInt");
}

aclError aclopCompileAndExecute(const char* operation, int inputs, const aclTensorDesc* const descriptions[],
                                const aclDataBuffer* const[], int, const aclTensorDesc* const[], aclDataBuffer* const[],
                                const aclopAttr*, aclopEngineType, aclopCompileType, const char*, aclrtStream) {
    return refuse(operation, inputs, descriptions);
}
aclError aclopCompileAndExecuteV2(const char* operation, int inputs, aclTensorDesc* descriptions[], aclDataBuffer*[],
                                  int, aclTensorDesc*[], aclDataBuffer*[], aclopAttr*, aclopEngineType,
                                  aclopCompileType, const char*, aclrtStream) {
    return refuse(operation, inputs, descriptions);
}
aclError aclopExecute(const char* operation, int inputs, const aclTensorDesc* const descriptions[],
                      const aclDataBuffer* const[], int, const aclTensorDesc* const[], aclDataBuffer* const[],
                      const aclopAttr*, aclrtStream) {
    return refuse(operation, inputs, descriptions);
}
aclError aclopExecuteV2(const char* operation, int inputs, aclTensorDesc* descriptions[], aclDataBuffer*[], int,
                        aclTensorDesc*[], aclDataBuffer*[], aclopAttr*, aclrtStream) {
    return refuse(operation, inputs, descriptions);
}

}  // extern "C"
