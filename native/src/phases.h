// The phases that ops are made of. Each divides its work into items that any thread may take.
#pragma once

#include "rotary.h"
#include "tape.h"

#include <algorithm>

namespace mill {

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
        Rows normed = rows;
        normed.data = dense;
        const float* w = norm.empty() ? nullptr : norm.data();
        for (int item = begin; item < end; ++item) {
            const float* tile = rows.tile(item);
            if (dense) k.rms_norm(tile, w, eps, rows.tile_rows(item), cols, normed.tile(item));
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
    Fetch fetch{};             // but for the frames, which are a plan's
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
    uint8_t* q;
    const LayerPlace& place;
    RotatePhase(const Kernels& k, RotateArgs a, std::vector<float> qn, std::vector<float> kn, Activations qkv, const float* cos, const float* sin, uint8_t* q, const LayerPlace& place)
        : k(k), args(a), q_norm(std::move(qn)), k_norm(std::move(kn)), qkv(qkv), cos(cos), sin(sin), q(q), place(place) {
        args.q_norm = q_norm.empty() ? nullptr : q_norm.data();
        args.k_norm = k_norm.empty() ? nullptr : k_norm.data();
    }
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        RotateArgs a = args;
        const Rows rows = qkv.rows(s);
        const size_t half = a.page.head_dim / 2, bytes = a.page.head_bytes(), q_bytes = a.heads * a.page.query_bytes();
        a.factor = place.factor.data();
        a.zero = place.zero.data();
        a.frames = scratch.frames.data();
        for (int row = begin; row < end; ++row) {
            for (int h = 0; h < a.kv_heads; ++h) scratch.frames[h] = place.slots[h] + size_t(s.frame[size_t(place.groups[h]) * s.rows + row]) * bytes;
            a.qkv = rows.row(row);
            a.cos = cos + row * half;
            a.sin = sin + row * half;
            a.q = q + row * q_bytes;
            a.slot = s.position[row] % kFrame;
            k.rotate_store(a);
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
