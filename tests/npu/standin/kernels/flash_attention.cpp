// Attention over whole tensors: what torch's scaled_dot_product_attention becomes on this device.
#include "kernel.h"

using namespace standin;

namespace {
// Numbers that say how the mask is meant.
enum Sparse { kGivenMask = 0, kWholeMask = 1, kCausalUpperLeft = 2 };

// Heads before places, as ATen wants them, and the numbers of a head side by side, without which it takes a slower way.
Tensor heads_first(const Tensor& tensor, const Text& layout) {
    TORCH_CHECK(layout == "BNSD" || layout == "BSND", "layout ", layout, " is not known to the stand-in");
    const auto heads = layout == "BNSD" ? tensor : tensor.transpose(1, 2);
    return heads.stride(-1) == 1 ? heads : heads.contiguous();
}
}  // namespace

// The running maxima and sums of the softmax are for a backward pass, which is out of reach: they stay as they are.
KERNEL(FlashAttentionScore, [](Tensor query, Tensor key, Tensor value, Tensor shift, Tensor dropped, Tensor /*padding*/,
                               Tensor mask, Ints /*prefix*/, double scale, double keep, int64_t /*before*/,
                               int64_t /*after*/, int64_t /*heads*/, Text layout, int64_t /*precise*/, int64_t sparse,
                               Out /*maxima*/, Out /*sums*/, Out /*softmax*/, Out out) {
    TORCH_CHECK(!shift.defined() && !dropped.defined() && keep == 1.0, "neither shifts nor dropout are known here");
    TORCH_CHECK(sparse <= kCausalUpperLeft, "sparse mode ", sparse, " is not known to the stand-in");
    // Causal: the caller passes a triangle of fixed size, which says no more than the mode does.
    const bool causal = sparse == kCausalUpperLeft;
    const auto q = heads_first(query, layout), k = heads_first(key, layout), v = heads_first(value, layout);
    const auto seen = mask.defined() && !causal ? std::optional(mask.to(at::kBool).logical_not()) : std::nullopt;
    const bool shared = q.size(1) != k.size(1);
    out = heads_first(at::scaled_dot_product_attention(q, k, v, seen, 0.0, causal, scale, shared), layout);
})
