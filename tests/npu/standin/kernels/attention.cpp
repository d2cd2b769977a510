// Attention over given lengths, npu_fused_infer_attention_score of the wheel: the operator whose lengths are host
// values. They are read when the call is made, so a captured one keeps them until NPUGraph.update gives it others.
//
// Layouts BNSD, BSND, BSH and TND; keys and values dense or in pages (block table); a mask of its own size, or the
// causal one of sparse mode 3. Quantisation, prefixes, shifts and split rotary parts are refused.
#include <limits>

#include "kernel.h"

namespace standin {
namespace {

struct Heads {
    std::string layout;
    int64_t queries;
    int64_t keys;  // 0 stands for as many as there are of the query

    int64_t of_keys() const { return keys ? keys : queries; }
};

// One sequence's rows as [heads, rows, width], from a dense tensor of any layout.
at::Tensor sequence(
    const at::Tensor& all, const Heads& heads, int64_t count, int64_t index, int64_t begin, int64_t rows
) {
    if (heads.layout == "TND") return all.narrow(0, begin, rows).transpose(0, 1);
    const auto one = all.select(0, index);
    if (heads.layout == "BNSD") return one.narrow(1, 0, rows);
    TORCH_CHECK(heads.layout == "BSND" || heads.layout == "BSH", "no layout ", heads.layout, " here");
    return one.narrow(0, 0, rows).reshape({rows, count, -1}).transpose(0, 1);
}

// One sequence's rows as [heads, rows, width], gathered from pages of [page, heads, width] or [heads, page, width].
at::Tensor paged(const at::Tensor& pages, const Heads& heads, const at::Tensor& table, int64_t index, int64_t rows) {
    auto by_row = pages.dim() == 4 ? pages.transpose(1, 2) : pages;
    const int64_t page = by_row.size(1);
    const auto used = table.select(0, index).narrow(0, 0, (rows + page - 1) / page).to(at::kLong);
    const int64_t width = by_row.numel() / (by_row.size(0) * page * heads.of_keys());
    return by_row.index_select(0, used).reshape({-1, heads.of_keys(), width}).narrow(0, 0, rows).transpose(0, 1);
}

// What each query row may not see: [rows, columns] of bool, or undefined where it sees all.
at::Tensor hidden(const at::Tensor& mask, int64_t mode, int64_t index, int64_t rows, int64_t columns) {
    if (mode == 3) return at::ones({rows, columns}, at::kBool).triu(columns - rows + 1);
    TORCH_CHECK(mode == 0, "no sparse mode ", mode, " here");
    if (!mask.defined()) return mask;
    auto own = mask;
    while (own.dim() > 2) own = own.select(0, own.size(0) > 1 ? index : 0);
    return own.narrow(0, 0, rows).narrow(1, 0, columns).to(at::kBool);
}

struct Attended {
    at::Tensor rows;  // [heads, rows, width]
    at::Tensor sums;  // [heads, rows, 1]: logarithms of the softmax's sums
};

Attended attend(at::Tensor query, at::Tensor key, at::Tensor value, const at::Tensor& mask, double scale) {
    const int64_t group = query.size(0) / key.size(0);
    key = key.to(at::kFloat).repeat_interleave(group, 0);
    value = value.to(at::kFloat).repeat_interleave(group, 0);
    auto scores = at::matmul(query.to(at::kFloat), key.transpose(1, 2)) * scale;
    if (mask.defined()) scores = scores.masked_fill(mask, -std::numeric_limits<float>::infinity());
    const auto sums = scores.logsumexp(2, true);
    return {at::matmul((scores - sums).exp().nan_to_num(0), value), sums};
}

// The length of sequence `index` and where it begins; lengths of TND are running totals, but for pages.
std::pair<int64_t, int64_t> extent(const Ints& lengths, int64_t index, bool totals, int64_t otherwise) {
    if (lengths.empty()) return {0, otherwise};
    if (!totals) return {0, lengths[lengths.size() == 1 ? 0 : index]};
    const int64_t begin = index ? lengths[index - 1] : 0;
    return {begin, lengths[index] - begin};
}

int64_t longest(const at::Tensor& dense, const std::string& layout) { return dense.size(layout == "BNSD" ? 2 : 1); }

// What is used of the interface; the parameters that it has besides are refused.
struct Call {
    Tensor query, key, value, mask, table;
    Ints query_lengths, key_lengths;
    Heads heads;
    double scale;
    int64_t sparse_mode;
    bool with_sums;
    Out out, sums;

    bool totals() const { return heads.layout == "TND"; }
    int64_t batch() const { return totals() ? static_cast<int64_t>(query_lengths.size()) : query.size(0); }

    at::Tensor rows_of(const at::Tensor& all, int64_t index, int64_t begin, int64_t count) const {
        return table.defined() ? paged(all, heads, table, index, count)
                               : sequence(all, heads, heads.of_keys(), index, begin, count);
    }

    void run_one(int64_t i) const {
        const auto [begin, rows] = extent(query_lengths, i, totals(), totals() ? 0 : longest(query, heads.layout));
        const auto [key_begin, columns] = extent(
            key_lengths, i, totals() && !table.defined(), table.defined() ? 0 : longest(key, heads.layout)
        );
        const auto found = attend(
            sequence(query, heads, heads.queries, i, begin, rows), rows_of(key, i, key_begin, columns),
            rows_of(value, i, key_begin, columns), hidden(mask, sparse_mode, i, rows, columns), scale
        );
        if (heads.layout == "BSH") {
            out.tensor.select(0, i).narrow(0, 0, rows).copy_(found.rows.transpose(0, 1).reshape({rows, -1}));
        } else {
            sequence(out.tensor, heads, heads.queries, i, begin, rows).copy_(found.rows);
        }
        if (!with_sums) return;
        const auto place = totals() ? sums.tensor.narrow(0, begin, rows).transpose(0, 1)
                                    : sums.tensor.select(0, i).narrow(1, 0, rows);
        place.copy_(found.sums);
    }

    void run() const {
        out.tensor.zero_();
        for (int64_t i = 0; i < batch(); ++i) run_one(i);
    }
};

void refuse(std::initializer_list<Tensor> given, const Ints& prefix_length) {
    for (const auto& tensor : given) {
        TORCH_CHECK(!tensor.defined(), "attention here has no quantisation, prefix, shift or padding");
    }
    TORCH_CHECK(prefix_length.empty(), "attention here has no prefix");
}

}  // namespace

// The wheel calls this one, in graphs and out of them ...
KERNEL(FusedInferAttentionScoreV2, [](
    const Tensor& query, const Tensors& keys, const Tensors& values, const Tensor& shift, const Tensor& mask,
    const Ints& query_lengths, const Ints& key_lengths, const Tensor& scale_1, const Tensor& quant_1,
    const Tensor& scale_2, const Tensor& quant_2, const Tensor& offset_2, const Tensor& antiquant_scale,
    const Tensor& antiquant_offset, const Tensor& table, const Tensor& query_padding, const Tensor& key_padding,
    const Tensor& key_scale, const Tensor& key_offset, const Tensor& value_scale, const Tensor& value_offset,
    const Tensor& key_prefix, const Tensor& value_prefix, const Ints& prefix_length, int64_t query_heads, double scale,
    int64_t, int64_t, const Text& layout, int64_t key_heads, int64_t sparse_mode, int64_t, int64_t, int64_t,
    bool with_sums, int64_t, int64_t, const Out& out, const Out& sums
) {
    refuse({shift, scale_1, quant_1, scale_2, quant_2, offset_2, antiquant_scale, antiquant_offset, query_padding,
            key_padding, key_scale, key_offset, value_scale, value_offset, key_prefix, value_prefix}, prefix_length);
    Call{query, keys[0], values[0], mask, table, query_lengths, key_lengths, Heads{layout, query_heads, key_heads},
         scale, sparse_mode, with_sums, out, sums}.run();
});

// ... and asks this one, of the interface with three parameters more, for the workspace that a graph will need whatever
// lengths an update brings. None is needed here.
STANDIN_EXPORT int aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize(
    const aclTensor*, const aclTensorList*, const aclTensorList*, const aclTensor*, const aclTensor*,
    const aclIntArray*, const aclIntArray*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclIntArray*, const aclTensor*, const aclTensor*, const aclTensor*, int64_t, double, int64_t, int64_t,
    const char*, int64_t, int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t, const aclTensor*,
    const aclTensor*, uint64_t* workspace, Prepared** prepared
) {
    *workspace = 0;
    *prepared = nullptr;
    return 0;
}

STANDIN_EXPORT int aclDestroyAclOpExecutor(Prepared* prepared) {
    delete prepared;
    return 0;
}

}  // namespace standin
