// HCCL's data types and reductions, and which of them the documents allow, by interface and product.
#pragma once

#include <string>

#include "hccl/layout.h"

namespace emulator {

// Generations by the documents' tables of products: Atlas A2, A3, Ascend 950, Atlas inference series, and the first.
enum class Product { a2, a3, ascend950, inference, first };
Product product();

size_t size_of(uint32_t dtype);  // bytes of an element; 0 for a value that is not one of HcclDataType
int acl_type(uint32_t dtype);    // the aclDataType
std::string dtype_name(uint32_t dtype);

// Describes a call for errors: "HcclReduce of 4 float16, sum, root 1".
std::string describe(const Call& call);

// The reason why the documents do not allow the call on this product, or an empty string.
std::string not_allowed(const Call& call);
// The same for an interface without data.
std::string not_allowed(const std::string& interface);

}  // namespace emulator
