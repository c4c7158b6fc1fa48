// The phases that ops are made of. Each divides its work into items that any thread may take.
#pragma once

#include "rotary.h"
#include "tape.h"

#include <algorithm>

namespace mill {

inline int first_visible(int position, int window) { return window ? std::max(0, position - window + 1) : 0; }

struct EmbedPhase final : Phase {
    std::shared_ptr<Weight> w;
    float* out;
    float scale;
    EmbedPhase(std::shared_ptr<Weight> w, float* out, float scale) : w(std::move(w)), out(out), scale(scale) {}
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        for (int row = begin; row < end; ++row) {
            float* to = out + size_t(row) * w->cols;
            dequantize_row(*w, s.batch.tokens[row], to);
            if (scale != 1.0f)
                for (int i = 0; i < w->cols; ++i) to[i] *= scale;
        }
    }
};

struct AnglePhase final : Phase {
    const std::vector<double>& inverse;
    float *cos, *sin;
    AnglePhase(const std::vector<double>& inverse, float* cos, float* sin) : inverse(inverse), cos(cos), sin(sin) {}
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        const size_t n = inverse.size();
        for (int row = begin; row < end; ++row)
            for (size_t i = 0; i < n; ++i) sin_cos(double(s.position[row]) * inverse[i], sin[row * n + i], cos[row * n + i]);
    }
};

// The norm before a linear op, and the quantisation of its input. An item is a tile of rows.
struct InputPhase final : Phase {
    const Kernels& k;
    const float* x;
    int cols;
    bool output_rows, quantize;
    std::vector<float> norm;   // empty: none
    float eps;
    float* dense;              // [rows][cols]; what the norm gives, where a dense weight reads it
    QuantRows* quant;
    InputPhase(const Kernels& k, const float* x, int cols, bool output_rows, bool quantize, std::vector<float> norm, float eps, float* dense, QuantRows* quant)
        : k(k), x(x), cols(cols), output_rows(output_rows), quantize(quantize), norm(std::move(norm)), eps(eps), dense(dense), quant(quant) {}
    int items(const StepState& s) const override {
        const int rows = output_rows ? s.outputs : s.rows;
        return (rows + kTile - 1) / kTile;
    }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        QuantRows rows = *quant;
        rows.rows = output_rows ? s.outputs : s.rows;
        rows.cols = cols;
        for (int item = begin; item < end; ++item) {
            QuantTile tile = rows.tile(item);
            if (quantize) std::fill_n(tile.used, QuantRows::words(cols), 0);
            int outliers[kTile] = {};
            for (int r = 0; r < tile.n; ++r) {
                const size_t row = size_t(item) * kTile + r;
                const float* y = x + row * cols;
                // Other threads wrote these rows: they are fetched from their caches ahead of use.
                if (r + 1 < tile.n) for (int i = 0; i < cols; i += 16) __builtin_prefetch(y + cols + i);
                if (!norm.empty()) {
                    float* to = dense ? dense + row * cols : scratch.row.as<float>();
                    k.rms_norm(y, norm.data(), eps, cols, to);
                    y = to;
                }
                if (quantize) outliers[r] = k.quantize(y, r, tile);
            }
            const int slots = *std::max_element(outliers, outliers + kTile);
            for (int r = 0; r < tile.n; ++r)
                for (int i = outliers[r]; i < slots; ++i) {
                    tile.at[i * tile.n + r] = 0;
                    tile.x[i * tile.n + r] = 0.0f;
                }
            quant->slots[item] = slots;
        }
    }
};

struct LinearPhase final : Phase {
    const Kernels& k;
    std::vector<std::shared_ptr<Weight>> weights;
    std::vector<int> first_item, first_output;
    const float* x;            // dense input
    const QuantRows* quant;
    std::vector<float> bias;
    Out out;
    bool output_rows;
    int total = 0;
    LinearPhase(const Kernels& k, std::vector<std::shared_ptr<Weight>> ws, const float* x, const QuantRows* quant, std::vector<float> b, Out out, bool output_rows)
        : k(k), weights(std::move(ws)), x(x), quant(quant), bias(std::move(b)), out(out), output_rows(output_rows) {
        int outputs = 0;
        for (const auto& w : weights) {
            first_item.push_back(total);
            first_output.push_back(outputs);
            total += w->panels();
            outputs += w->rows;
        }
        if (out.kind == Out::Gate) total = weights[0]->panels();
    }
    int items(const StepState& s) const override { return (output_rows ? s.outputs : s.rows) ? total : 0; }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const int rows = output_rows ? s.outputs : s.rows;
        if (out.kind == Out::Gate) {
            // In short runs, so that what the first weight gives is still in the cache when the second multiplies it.
            for (int at = begin; at < end; at += kGatePanels) {
                const int stop = std::min(end, at + kGatePanels);
                Out first = out;
                first.kind = Out::Store;
                panels(*weights[0], at, stop, rows, first, scratch);
                panels(*weights[1], at, stop, rows, out, scratch);
            }
            return;
        }
        for (size_t i = 0; i < weights.size(); ++i) {
            const int from = std::max(begin, first_item[i]) - first_item[i], to = std::min(end - first_item[i], weights[i]->panels());
            if (from >= to) continue;
            Out part = out;
            part.out += first_output[i];
            part.bias = bias.empty() ? nullptr : bias.data() + first_output[i];
            panels(*weights[i], from, to, rows, part, scratch);
        }
    }

private:
    static constexpr int kGatePanels = 4;

    void panels(const Weight& w, int begin, int end, int rows, const Out& to, ThreadScratch& scratch) const {
        if (traits(w.form).dense()) return k.linear_dense(w, begin, end, x, w.cols, rows, to);
        QuantRows from = *quant;
        from.rows = rows;
        from.cols = w.cols;
        k.linear_quant(w, begin, end, from, to, {scratch.columns.as<float>(), scratch.places.as<ColumnPlace>(), scratch.number.as<uint32_t>()});
    }
};

struct RotatePhase final : Phase {
    const Kernels& k;
    RotateArgs args;
    std::vector<float> q_norm, k_norm;
    const float *qkv, *cos, *sin;
    size_t qkv_width;
    uint16_t* q;
    uint8_t* layer;
    PageFormat page;
    RotatePhase(const Kernels& k, RotateArgs a, std::vector<float> qn, std::vector<float> kn, const float* qkv, size_t width, const float* cos, const float* sin, uint16_t* q, uint8_t* layer, PageFormat page)
        : k(k), args(a), q_norm(std::move(qn)), k_norm(std::move(kn)), qkv(qkv), cos(cos), sin(sin), qkv_width(width), q(q), layer(layer), page(page) {
        args.q_norm = q_norm.empty() ? nullptr : q_norm.data();
        args.k_norm = k_norm.empty() ? nullptr : k_norm.data();
    }
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        RotateArgs a = args;
        const size_t half = a.head_dim / 2;
        for (int row = begin; row < end; ++row) {
            a.qkv = qkv + row * qkv_width;
            a.cos = cos + row * half;
            a.sin = sin + row * half;
            a.q = q + size_t(row) * a.heads * a.head_dim;
            a.frame = layer + size_t(s.frame[row]) * page.frame_bytes();
            a.slot = s.position[row] % kFrame;
            k.rotate_store(a);
        }
    }
};

struct AttendArgs {
    const Kernels& k;
    const uint8_t* layer;
    PageFormat page;
    int heads, plan;
    const uint16_t* q;
    float* out;
    size_t out_width;
    const Partials& partials;
};

// Rows of an item, and where each one's output goes.
struct ItemRows {
    VisibleRow rows[kMaxAttendRows];
    float* out[kMaxAttendRows];
    ItemRows(const AttendArgs& a, const StepState& s, const AttendItem& item, int window) {
        const Segment& segment = s.batch.segments[item.segment];
        const int group = a.heads / a.page.kv_heads, hd = a.page.head_dim;
        for (int i = 0; i < item.count; ++i) {
            const int stacked = item.first + i, token = stacked / group;
            const int row = segment.row + token, head = item.kv_head * group + stacked % group;
            const int position = segment.position + token;
            rows[i] = {a.q + (size_t(row) * a.heads + head) * hd, first_visible(position, window), position + 1};
            out[i] = a.out + row * a.out_width + size_t(head) * hd;
        }
    }
};

inline void attend_one_cut(const AttendArgs& a, const StepState& s, const AttendItem& item, const VisibleRow* rows, int cut, ThreadScratch& scratch, CutResult& result) {
    const Segment& segment = s.batch.segments[item.segment];
    int lo = rows[0].lo, hi = rows[0].hi;
    for (int i = 1; i < item.count; ++i) { lo = std::min(lo, rows[i].lo); hi = std::max(hi, rows[i].hi); }
    const int first = std::max(lo, cut * kCut) / kFrame, last = (std::min(hi, (cut + 1) * kCut) + kFrame - 1) / kFrame;
    const uint8_t* frames[kCut / kFrame];
    const int32_t* starts = s.batch.starts.data() + segment.extent;
    const int32_t* extents = s.batch.frames.data() + segment.extent;
    int e = int(std::upper_bound(starts, starts + segment.extents, first) - starts) - 1;
    const size_t bytes = a.page.frame_bytes();
    const uint8_t* base = a.layer + size_t(item.kv_head) * a.page.head_bytes();
    for (int f = first; f < last; ++f) {
        while (e + 1 < segment.extents && starts[e + 1] <= f) ++e;
        frames[f - cut * (kCut / kFrame)] = base + size_t(extents[e] + (f - starts[e])) * bytes;
    }
    a.k.attend_cut(rows, item.count, frames, cut, a.page.head_dim, *scratch.attend, result);
}

struct AttendPhase final : Phase {
    AttendArgs a;
    explicit AttendPhase(const AttendArgs& a) : a(a) {}
    int items(const StepState& s) const override { return int(s.plans[a.plan].items.size()); }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const AttendPlan& plan = s.plans[a.plan];
        const int hd = a.page.head_dim;
        for (int i = begin; i < end; ++i) {
            const AttendItem& item = plan.items[i];
            const ItemRows at(a, s, item, plan.window);
            CutResult cut;
            if (item.cut >= 0) {
                cut.o = a.partials.o + size_t(item.partial) * kMaxAttendRows * hd;
                attend_one_cut(a, s, item, at.rows, item.cut, scratch, cut);
                float* m = a.partials.m + size_t(item.partial) * 2 * kMaxAttendRows;
                std::copy_n(cut.m, item.count, m);
                std::copy_n(cut.l, item.count, m + kMaxAttendRows);
                continue;
            }
            cut.o = scratch.o.as<float>();
            CutResult total;
            total.o = scratch.total.as<float>();
            std::fill_n(total.l, kMaxAttendRows, 0.0f);
            int lo = at.rows[0].lo, hi = at.rows[0].hi;
            for (int r = 1; r < item.count; ++r) { lo = std::min(lo, at.rows[r].lo); hi = std::max(hi, at.rows[r].hi); }
            for (int c = lo / kCut; c <= (hi - 1) / kCut; ++c) {
                attend_one_cut(a, s, item, at.rows, c, scratch, cut);
                a.k.merge_cut(total, cut, item.count, hd);
            }
            for (int r = 0; r < item.count; ++r) a.k.finish(total, r, hd, at.out[r]);
        }
    }
};

struct MergePhase final : Phase {
    AttendArgs a;
    explicit MergePhase(const AttendArgs& a) : a(a) {}
    int items(const StepState& s) const override { return int(s.plans[a.plan].merges.size()); }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const AttendPlan& plan = s.plans[a.plan];
        const int hd = a.page.head_dim;
        for (int i = begin; i < end; ++i) {
            const AttendItem& item = plan.merges[i];
            const ItemRows at(a, s, item, plan.window);
            CutResult total, cut;
            total.o = scratch.total.as<float>();
            std::fill_n(total.l, kMaxAttendRows, 0.0f);
            for (int c = 0; c < item.cut; ++c) {
                const size_t partial = item.partial + c;
                const float* m = a.partials.m + partial * 2 * kMaxAttendRows;
                std::copy_n(m, item.count, cut.m);
                std::copy_n(m + kMaxAttendRows, item.count, cut.l);
                cut.o = a.partials.o + partial * kMaxAttendRows * hd;
                a.k.merge_cut(total, cut, item.count, hd);
            }
            for (int r = 0; r < item.count; ++r) a.k.finish(total, r, hd, at.out[r]);
        }
    }
};

struct AddNormPhase final : Phase {
    const Kernels& k;
    float *x, *y;
    int width;
    bool output_rows;
    std::vector<float> weight;
    float eps;
    AddNormPhase(const Kernels& k, float* x, float* y, int width, bool output_rows, std::vector<float> w, float eps)
        : k(k), x(x), y(y), width(width), output_rows(output_rows), weight(std::move(w)), eps(eps) {}
    int items(const StepState& s) const override { return output_rows ? s.outputs : s.rows; }
    void run(const StepState&, int begin, int end, ThreadScratch&) override {
        for (int row = begin; row < end; ++row) {
            float* from = y + size_t(row) * width;
            k.rms_norm(from, weight.data(), eps, width, from);
            k.add(x + size_t(row) * width, from, width);
        }
    }
};

struct SelectPhase final : Phase {
    const float* x;
    float* out;
    int width;
    SelectPhase(const float* x, float* out, int width) : x(x), out(out), width(width) {}
    int items(const StepState& s) const override { return s.outputs; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        for (int i = begin; i < end; ++i) std::copy_n(x + size_t(s.batch.outputs[i]) * width, width, out + size_t(i) * width);
    }
};

}  // namespace mill
