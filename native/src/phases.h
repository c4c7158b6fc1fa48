// The phases that ops are made of. Each divides its work into items that any thread may take.
#pragma once

#include "rotary.h"
#include "tape.h"

#include <algorithm>

namespace mill {

inline int first_visible(int position, int window) { return window ? std::max(0, position - window + 1) : 0; }

// A tape's buffer in a step.
struct Activations {
    Rows all;                  // but for the number of rows
    bool output_rows;
    int count(const StepState& s) const { return output_rows ? s.outputs : s.rows; }
    Rows rows(const StepState& s) const { Rows r = all; r.rows = count(s); return r; }
    int tiles(const StepState& s) const { return rows(s).tiles(); }
};

inline void copy_row(const Row& from, const Row& to, size_t width) {
    for (size_t i = 0; i < width; i += kLanes) std::copy_n(from.at(i), kLanes, to.at(i));
}

struct EmbedPhase final : Phase {
    std::shared_ptr<Weight> w;
    Activations out;
    float scale;
    EmbedPhase(std::shared_ptr<Weight> w, Activations out, float scale) : w(std::move(w)), out(out), scale(scale) {}
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const Rows rows = out.rows(s);
        float* x = scratch.row.as<float>();
        for (int row = begin; row < end; ++row) {
            dequantize_row(*w, s.batch.tokens[row], x);
            if (scale != 1.0f)
                for (int i = 0; i < w->cols; ++i) x[i] *= scale;
            copy_row({x, kLanes}, rows.row(row), rows.width);
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
    Activations x;
    int cols;
    std::vector<float> norm;   // empty: none
    float eps;
    float* dense;              // what the norm gives, in tiles, or null: no dense weight reads it
    QuantRows* quant;          // null: all weights are dense
    InputPhase(const Kernels& k, Activations x, int cols, std::vector<float> norm, float eps, float* dense, QuantRows* quant)
        : k(k), x(x), cols(cols), norm(std::move(norm)), eps(eps), dense(dense), quant(quant) {}
    int items(const StepState& s) const override { return x.tiles(s); }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        const Rows rows = x.rows(s);
        const float* w = norm.empty() ? nullptr : norm.data();
        for (int item = begin; item < end; ++item) {
            const float* tile = rows.tile(item);
            if (dense) k.rms_norm(tile, w, eps, rows.tile_rows(item), cols, dense + size_t(item) * kTile * rows.width);
            if (!quant) continue;
            QuantRows to = *quant;
            to.rows = rows.rows;
            to.cols = cols;
            quant->slots[item] = k.quantize(tile, w, eps, to.tile(item));
        }
    }
};

struct LinearPhase final : Phase {
    const Kernels& k;
    std::vector<std::shared_ptr<Weight>> weights;
    std::vector<int> first_item, first_output;
    Activations x, to;
    const float* dense;        // in place of x, or null
    const QuantRows* quant;
    std::vector<float> bias;
    Out::Kind kind;
    Activation activation;
    Fetch fetch{};             // but for the frames, which are those of a plan
    int fetch_plan = 0, total = 0;
    uint16_t input;            // which of the tape's inputs it reads
    LinearPhase(const Kernels& k, std::vector<std::shared_ptr<Weight>> ws, Activations x, const float* dense, const QuantRows* quant, std::vector<float> b,
                Activations to, Out::Kind kind, Activation activation, uint16_t input)
        : k(k), weights(std::move(ws)), x(x), to(to), dense(dense), quant(quant), bias(std::move(b)), kind(kind), activation(activation), input(input) {
        int outputs = 0;
        for (const auto& w : weights) {
            first_item.push_back(total);
            first_output.push_back(outputs);
            total += w->panels();
            outputs += w->rows;
        }
        if (kind == Out::Gate) total = weights[0]->panels();
    }
    size_t bytes() const {
        size_t sum = 0;
        for (const auto& w : weights) sum += w->panels() * w->panel_bytes();
        return sum;
    }
    int items(const StepState& s) const override { return x.count(s) ? total : 0; }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        Fetch ahead = fetch;
        if (fetch.span) {
            ahead.frames = s.plans[fetch_plan].frames.data();
            ahead.count = int(s.plans[fetch_plan].frames.size());
        }
        Rows from = x.rows(s);
        if (dense) from.data = const_cast<float*>(dense);
        Out out{to.rows(s), 0, nullptr, kind, activation};
        if (kind == Out::Gate) {
            // In short runs, so that what the first weight gives is still in the cache when the second multiplies it.
            for (int at = begin; at < end; at += kGatePanels) {
                const int stop = std::min(end, at + kGatePanels);
                out.kind = Out::Store;
                panels(0, at, stop, s, from, out, ahead, scratch);
                out.kind = Out::Gate;
                panels(1, at, stop, s, from, out, ahead, scratch);
            }
            return;
        }
        for (size_t i = 0; i < weights.size(); ++i) {
            const int first = std::max(begin, first_item[i]) - first_item[i], last = std::min(end - first_item[i], weights[i]->panels());
            if (first >= last) continue;
            out.first = first_output[i];
            out.bias = bias.empty() ? nullptr : bias.data() + first_output[i];
            panels(i, first, last, s, from, out, ahead, scratch);
        }
    }

private:
    static constexpr int kGatePanels = 4;

    void panels(size_t weight, int begin, int end, const StepState& s, const Rows& from, const Out& out, Fetch fetch, ThreadScratch& scratch) const {
        const Weight& w = *weights[weight];
        if (traits(w.form).dense()) return k.linear_dense(w, begin, end, from, out);
        QuantRows rows = *quant;
        rows.rows = from.rows;
        rows.cols = w.cols;
        rows.stamp = s.step << 16 | input;
        for (size_t i = 0; i < weight; ++i) fetch.begin += weights[i]->panels() * weights[i]->panel_bytes();
        k.linear_quant(w, begin, end, rows, out, fetch, scratch.linear);
    }
};

struct RotatePhase final : Phase {
    const Kernels& k;
    RotateArgs args;
    std::vector<float> q_norm, k_norm;
    Activations qkv;
    const float *cos, *sin;
    uint16_t* q;
    uint8_t* layer;
    PageFormat page;
    RotatePhase(const Kernels& k, RotateArgs a, std::vector<float> qn, std::vector<float> kn, Activations qkv, const float* cos, const float* sin, uint16_t* q, uint8_t* layer, PageFormat page)
        : k(k), args(a), q_norm(std::move(qn)), k_norm(std::move(kn)), qkv(qkv), cos(cos), sin(sin), q(q), layer(layer), page(page) {
        args.q_norm = q_norm.empty() ? nullptr : q_norm.data();
        args.k_norm = k_norm.empty() ? nullptr : k_norm.data();
    }
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        RotateArgs a = args;
        const Rows rows = qkv.rows(s);
        const size_t half = a.head_dim / 2;
        for (int row = begin; row < end; ++row) {
            a.qkv = rows.row(row);
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
    Activations out;
    const Partials& partials;
};

// Rows of an item, and where each one's output goes.
struct ItemRows {
    VisibleRow rows[kMaxAttendRows];
    Row out[kMaxAttendRows];
    ItemRows(const AttendArgs& a, const StepState& s, const AttendItem& item, int window) {
        const Segment& segment = s.batch.segments[item.segment];
        const int group = a.heads / a.page.kv_heads, hd = a.page.head_dim;
        const Rows to = a.out.rows(s);
        for (int i = 0; i < item.count; ++i) {
            const int stacked = item.first + i, token = stacked / group;
            const int row = segment.row + token, head = item.kv_head * group + stacked % group;
            const int position = segment.position + token;
            rows[i] = {a.q + (size_t(row) * a.heads + head) * hd, first_visible(position, window), position + 1};
            out[i] = to.row(row).from(size_t(head) * hd);
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
    Activations x, y;
    std::vector<float> weight;
    float eps;
    AddNormPhase(const Kernels& k, Activations x, Activations y, std::vector<float> w, float eps) : k(k), x(x), y(y), weight(std::move(w)), eps(eps) {}
    int items(const StepState& s) const override { return x.tiles(s); }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        const Rows to = x.rows(s), from = y.rows(s);
        for (int tile = begin; tile < end; ++tile) {
            const int n = to.tile_rows(tile);
            k.rms_norm(from.tile(tile), weight.data(), eps, n, int(weight.size()), from.tile(tile));
            k.add(to.tile(tile), from.tile(tile), n * int(to.width));
        }
    }
};

struct SelectPhase final : Phase {
    Activations x, out;
    SelectPhase(Activations x, Activations out) : x(x), out(out) {}
    int items(const StepState& s) const override { return s.outputs; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        const Rows from = x.rows(s), to = out.rows(s);
        for (int i = begin; i < end; ++i) copy_row(from.row(s.batch.outputs[i]), to.row(i), to.width);
    }
};

}  // namespace mill
