// Copies of tensor lists, with which torch_npu fills a graph's inputs.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: foreach/foreach_copy/docs/aclnnForeachCopy.md");

static void check(Ins source, Outs target) {
    require(source.size() == target.size(), "the input and output lists must have the same length, but have " +
                                                std::to_string(source.size()) + " and " +
                                                std::to_string(target.size()));
    for (size_t i = 0; i < source.size(); ++i) require_shape(target[i], source[i].sizes(), "an output");
}
static void ForeachCopy(Ins source, Outs target) {
    for (size_t i = 0; i < source.size(); ++i) target[i].set(source[i]);
}
ACLNN(ForeachCopy, .check = check)
