// ATB operations that torch_npu links and that are not emulated.
#include <stdexcept>

#include "atb.h"
#include "runtime/source.h"

OURS("not emulated");

namespace atb {

namespace infer {
struct ElewiseParam;
struct GroupTopkParam;
struct LinearParam;
struct RmsNormParam;
struct RopeParam;
struct SelfAttentionParam;
}  // namespace infer

#define REFUSED(name)                                                                                                 \
    template <>                                                                                                       \
    Status CreateOperation<infer::name##Param>(const infer::name##Param&, Operation**) {                              \
        throw std::runtime_error("ATB's " #name                                                                       \
                                 "Operation is not emulated. The emulated operations of ATB are paged attention and " \
                                 "reshape-and-cache (atb::_npu_paged_attention, atb::_npu_reshape_and_cache)");       \
    }

REFUSED(Elewise)
REFUSED(GroupTopk)
REFUSED(Linear)
REFUSED(RmsNorm)
REFUSED(Rope)
REFUSED(SelfAttention)

}  // namespace atb
