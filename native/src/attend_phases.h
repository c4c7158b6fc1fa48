// Attention: the cuts of each block of rows, what they come to together, and what they weigh.
#pragma once

#include "phases.h"

namespace mill {

inline int first_visible(int position, int window) { return window ? std::max(0, position - window + 1) : 0; }

// What the rows of a segment see of a KV group: the row at position t sees [lo(t), t], but of a streaming group [lo(t), sinks) and [recent(t), t].
struct Sight {
    int window, sinks = 0, length = 0;
    Sight(const Segment& s, int window, const Streaming& streaming) : window(window) {
        if (s.sparse && streaming.recent) sinks = streaming.sinks, length = streaming.recent;
    }
    int lo(int t) const { return first_visible(t, window); }
    int recent(int t) const { return length ? std::max(lo(t), t - length + 1) : lo(t); }
    // Whether a row that sees the last positions from `recent` on sees something of a cut, as far as the gap goes.
    bool sees(int cut, int recent) const { return cut * kCut < sinks || (cut + 1) * kCut > recent; }
};

struct AttendArgs {
    const Kernels& k;
    const LayerPlace& place;
    const PageFormat& page;
    const std::vector<KVGroup>& groups;
    int layer, heads, kv_heads, plan;
    const uint8_t* q;
    Activations out;
    const Partials& partials;
    float* sums;
};

// Rows of an item, and what they see together.
struct ItemRows {
    VisibleRow rows[kMaxAttendRows];
    int token[kMaxAttendRows], head[kMaxAttendRows];
    const AttendArgs& a;
    const Segment& segment;
    const AttendItem& item;
    const PageTable& table;
    const Sight sight;
    int lo, recent, hi;
    ItemRows(const AttendArgs& a, const StepState& s, const AttendItem& item)
        : a(a), segment(s.batch.segments[item.segment]), item(item), table(table_of(a, s, item)),
          sight(segment, s.plans[a.plan].window, a.groups[a.place.groups[item.kv_head]].streaming) {
        const int group = a.heads / a.kv_heads, end = (item.kv_head + 1) * group;
        const size_t q_bytes = a.page.query_bytes();
        int t = item.first / group, h = end - group + item.first % group;
        for (int i = 0; i < item.count; ++i) {
            token[i] = t;
            head[i] = h;
            const int position = segment.position + t;
            rows[i] = {a.q + (size_t(segment.row + t) * a.heads + h) * q_bytes, sight.lo(position), sight.recent(position), position + 1};
            if (++h < end) continue;
            h -= group;
            ++t;
        }
        lo = rows[0].lo;   // rows ascend
        recent = rows[0].recent;
        hi = rows[item.count - 1].hi;
    }

    // Calls body with each cut that a row may see something of.
    template <class Body> void each_cut(const StepState& s, const AttendItem* next, Body body) const {
        const int last = (hi - 1) / kCut;
        for (int c = lo / kCut; c <= last; ++c) {
            if (!sight.sees(c, recent)) continue;
            Cut here = cut(s, c);
            if (c == last && next) look_ahead(here, s, *next);
            body(here);
        }
    }

    Cut cut(const StepState& s, int number) const {
        Cut c;
        c.number = number;
        c.runs = 0;
        c.next = nullptr;
        add_runs(c, s, lo, std::min(hi, sight.sinks), true);
        add_runs(c, s, std::max(recent, sight.sinks), hi, false);
        return c;
    }

    // Has what the next item begins with fetched at the end of a cut. It is taken to be of one page.
    void look_ahead(Cut& c, const StepState& s, const AttendItem& next) const {
        const Segment& after = s.batch.segments[next.segment];
        if (after.rows == 1) c.next = frame_of(s, table_of(a, s, next), next.kv_head, std::max(sight.lo(after.position), next.cut * kCut) / kFrame);
    }

    // Finishes the rows: writes what attention gives, and keeps what weighing needs.
    void finish(const StepState& s, const CutResult& total) const {
        const Rows to = a.out.rows(s);
        for (int r = 0; r < item.count; ++r) {
            a.k.finish(total, r, a.page.head_dim, to.row(segment.row + token[r]).from(size_t(head[r]) * a.page.head_dim));
            if (segment.weigh < 0) continue;
            float* sums = sums_of(r);
            sums[0] = total.m[r];
            sums[1] = total.l[r];
        }
    }

    float* sums_of(int r) const { return a.sums + (size_t(segment.row + token[r]) * a.heads + head[r]) * 2; }

private:
    static const PageTable& table_of(const AttendArgs& a, const StepState& s, const AttendItem& item) {
        return s.batch.tables[item.segment * a.groups.size() + a.place.groups[item.kv_head]];
    }

    const uint8_t* frame_of(const StepState& s, const PageTable& table, int kv_head, int number) const {
        const int32_t* starts = s.batch.starts.data() + table.extent;
        const size_t e = table.extent + (std::upper_bound(starts, starts + table.extents, number) - starts) - 1;
        const int32_t first = s.batch.frames[e];
        return first < 0 ? nullptr : a.place.slots[kv_head] + size_t(first + number - s.batch.starts[e]) * a.page.head_bytes();
    }

    // The frames of [lo, hi) that are in the cut and not in a hole.
    void add_runs(Cut& c, const StepState& s, int lo, int hi, bool early) const {
        lo = std::max(lo, c.number * kCut);
        hi = std::min(hi, (c.number + 1) * kCut);
        if (lo >= hi) return;
        const int last = (hi + kFrame - 1) / kFrame, origin = c.number * Cut::kFrames;
        const int32_t* starts = s.batch.starts.data() + table.extent;
        const int32_t* extents = s.batch.frames.data() + table.extent;
        const size_t bytes = a.page.head_bytes();
        int f = lo / kFrame, e = int(std::upper_bound(starts, starts + table.extents, f) - starts) - 1;
        for (bool open = false; f < last; ++e) {
            const int end = e + 1 < table.extents ? std::min(last, starts[e + 1]) : last;
            if (extents[e] < 0) {
                open = false;
                f = end;
                continue;
            }
            if (!open) c.run[c.runs++] = {f - origin, f - origin, early};
            open = true;
            const uint8_t* frame = a.place.slots[item.kv_head] + size_t(extents[e] + (f - starts[e])) * bytes;
            for (; f < end; ++f, frame += bytes) c.frames[f - origin] = frame;
            c.run[c.runs - 1].last = f - origin;
        }
    }
};

struct AttendPhase final : Phase {
    AttendArgs a;
    explicit AttendPhase(const AttendArgs& a) : a(a) {}
    int items(const StepState& s) const override { return int(s.plans[a.plan].items.size()); }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const AttendPlan& plan = s.plans[a.plan];
        const int hd = a.page.head_dim;
        for (int i = begin; i < end; ++i) {
            const AttendItem& item = plan.items[i];
            const AttendItem* next = i + 1 < end ? &plan.items[i + 1] : nullptr;
            const ItemRows at(a, s, item);
            CutResult part;
            if (item.cut >= 0) {
                Cut cut = at.cut(s, item.cut);
                if (next) at.look_ahead(cut, s, *next);
                part.o = a.partials.o + size_t(item.partial) * kMaxAttendRows * hd;
                a.k.attend_cut(a.page, at.rows, item.count, cut, *scratch.attend, part);
                float* m = a.partials.m + size_t(item.partial) * 2 * kMaxAttendRows;
                std::copy_n(part.m, item.count, m);
                std::copy_n(part.l, item.count, m + kMaxAttendRows);
                continue;
            }
            part.o = scratch.o.as<float>();
            CutResult total;
            total.o = scratch.total.as<float>();
            std::fill_n(total.l, kMaxAttendRows, 0.0f);
            at.each_cut(s, next, [&](const Cut& cut) {
                a.k.attend_cut(a.page, at.rows, item.count, cut, *scratch.attend, part);
                a.k.merge_cut(total, part, item.count, hd);
            });
            at.finish(s, total);
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
            const ItemRows at(a, s, item);
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
            at.finish(s, total);
        }
    }
};

// Recomputes scores with what all cuts came to. An item is a kv head of a segment whose weights are wanted.
struct WeighPhase final : Phase {
    AttendArgs a;
    explicit WeighPhase(const AttendArgs& a) : a(a) {}
    int items(const StepState& s) const override { return int(s.weighed.size()); }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        for (int i = begin; i < end; ++i) {
            const AttendItem& all = s.weighed[i];
            const FrameWeights& to = s.batch.weights[s.batch.segments[all.segment].weigh];
            int64_t* weights = to.data + (size_t(a.layer) * a.kv_heads + all.kv_head) * to.frames;
            for (int first = 0; first < all.count; first += a.k.attend_rows) {
                const AttendItem item{all.segment, first, std::min(a.k.attend_rows, all.count - first), all.kv_head, -1, 0};
                const ItemRows at(a, s, item);
                float m[kMaxAttendRows], l[kMaxAttendRows];
                for (int r = 0; r < item.count; ++r) {
                    m[r] = at.sums_of(r)[0];
                    l[r] = at.sums_of(r)[1];
                }
                at.each_cut(s, nullptr, [&](const Cut& cut) {
                    a.k.weigh_frames(a.page, at.rows, item.count, cut, *scratch.attend, m, l, weights + cut.number * Cut::kFrames);
                });
            }
        }
    }
};

}  // namespace mill
