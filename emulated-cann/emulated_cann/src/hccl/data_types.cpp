#include "hccl/data_types.h"

#include <map>
#include <set>

#include "runtime/errors.h"

namespace emulator {

namespace {

struct Type {
    const char* name;
    size_t bytes;
    int acl;
};
const std::map<uint32_t, Type> types = {
    {HCCL_DATA_TYPE_INT8, {"int8", 1, ACL_INT8}},
    {HCCL_DATA_TYPE_INT16, {"int16", 2, ACL_INT16}},
    {HCCL_DATA_TYPE_INT32, {"int32", 4, ACL_INT32}},
    {HCCL_DATA_TYPE_FP16, {"float16", 2, ACL_FLOAT16}},
    {HCCL_DATA_TYPE_FP32, {"float32", 4, ACL_FLOAT}},
    {HCCL_DATA_TYPE_INT64, {"int64", 8, ACL_INT64}},
    {HCCL_DATA_TYPE_UINT64, {"uint64", 8, ACL_UINT64}},
    {HCCL_DATA_TYPE_UINT8, {"uint8", 1, ACL_UINT8}},
    {HCCL_DATA_TYPE_UINT16, {"uint16", 2, ACL_UINT16}},
    {HCCL_DATA_TYPE_UINT32, {"uint32", 4, ACL_UINT32}},
    {HCCL_DATA_TYPE_FP64, {"float64", 8, ACL_DOUBLE}},
    {HCCL_DATA_TYPE_BFP16, {"bfloat16", 2, ACL_BF16}},
    {HCCL_DATA_TYPE_HIF8, {"hifloat8", 1, ACL_HIFLOAT8}},
    {HCCL_DATA_TYPE_FP8E4M3, {"float8_e4m3", 1, ACL_FLOAT8_E4M3FN}},
    {HCCL_DATA_TYPE_FP8E5M2, {"float8_e5m2", 1, ACL_FLOAT8_E5M2}},
    {HCCL_DATA_TYPE_FP8E8M0, {"float8_e8m0", 1, ACL_FLOAT8_E8M0}},
};
const char* const reductions[] = {"sum", "prod", "max", "min"};

using Types = std::set<std::string>;

Types moved() {
    Types all = {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"};
    if (product() == Product::ascend950) all.insert({"float8_e5m2", "float8_e4m3", "float8_e8m0", "hifloat8"});
    if (product() != Product::inference && product() != Product::first) all.insert("bfloat16");
    return all;
}

Types reduced(bool uneven) {
    switch (product()) {
        case Product::ascend950: {
            Types all = {"int8", "int16", "int32", "int64", "float16", "float32", "bfloat16"};
            if (!uneven) all.insert({"uint64", "float64"});
            return all;
        }
        case Product::a3:
            return {"int8", "int16", "int32", "int64", "float16", "float32", "bfloat16"};
        case Product::a2:
            if (uneven) return {"int8", "int16", "int32", "float16", "float32", "bfloat16"};
            return {"int8", "int16", "int32", "int64", "float16", "float32", "bfloat16"};
        case Product::inference:
            if (uneven) return {"int16", "float16", "float32"};
            return {"int8", "int16", "int32", "float16", "float32"};
        default:
            return {"int8", "int32", "int64", "float16", "float32"};
    }
}

bool may_reduce(const std::string& type, const std::string& reduction, bool uneven) {
    switch (product()) {
        case Product::inference:
            return reduction == "sum" || (!uneven && type != "int16");
        case Product::first:
            return true;
        case Product::ascend950:
            uneven = false;
            [[fallthrough]];
        default:
            return reduction != "prod" || (!uneven && type != "int16" && type != "bfloat16");
    }
}

const std::set<std::string> not_on_inference = {"HcclBroadcast", "HcclReduce",        "HcclScatter",   "HcclAlltoAllVC",
                                                "HcclSend",      "HcclRecv",          "HcclBarrier",   "HcclBatchSendRecv",
                                                "HcclGroupStart", "HcclCreateSubCommConfig"};
const std::set<std::string> not_on_first = {"HcclAllGatherV", "HcclReduceScatterV", "HcclAlltoAllVC", "HcclGroupStart"};

}  // namespace

Product product() {
    const std::string& soc = soc_name();
    if (soc.starts_with("Ascend950") || soc.starts_with("Ascend910_95")) return Product::ascend950;
    if (soc.starts_with("Ascend910_93")) return Product::a3;
    if (soc.starts_with("Ascend910B")) return Product::a2;
    return soc.starts_with("Ascend310P") ? Product::inference : Product::first;
}

size_t size_of(uint32_t dtype) {
    auto found = types.find(dtype);
    return found == types.end() ? 0 : found->second.bytes;
}

int acl_type(uint32_t dtype) { return types.at(dtype).acl; }

std::string dtype_name(uint32_t dtype) {
    auto found = types.find(dtype);
    return found == types.end() ? format("data type %u", dtype) : found->second.name;
}

std::string describe(const Call& call) {
    std::string result = std::string(call.name) + format(" of %lu ", static_cast<unsigned long>(call.count));
    result += dtype_name(call.dtype);
    if (call.reduction) result += std::string(", ") + (call.reduction <= 4 ? reductions[call.reduction - 1] : "?");
    if (call.root) result += format(", root %u", call.root - 1);
    return result;
}

std::string not_allowed(const std::string& interface) {
    bool absent = (product() == Product::inference && not_on_inference.count(interface)) ||
                  (product() == Product::first && not_on_first.count(interface));
    return absent ? interface + " is not for " + soc_name() : "";
}

std::string not_allowed(const Call& call) {
    std::string interface = call.name;
    if (auto reason = not_allowed(interface); !reason.empty()) return reason;
    bool uneven = interface == "HcclReduceScatterV";
    auto type = dtype_name(call.dtype);
    if (!(call.reduction ? reduced(uneven) : moved()).count(type)) {
        return interface + " does not support " + type + " on " + soc_name();
    }
    if (!call.reduction) return "";
    if (call.reduction > 4) return interface + format(": %u is not a value of HcclReduceOp", call.reduction - 1);
    const char* reduction = reductions[call.reduction - 1];
    if (may_reduce(type, reduction, uneven)) return "";
    return interface + " does not support the reduction " + reduction + " of " + type + " on " + soc_name();
}

}  // namespace emulator
