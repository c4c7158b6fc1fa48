// What rows see of a cut, and fetching it.

// Positions [from, to) of a cut, all of them written: those of a run that some row sees.
struct Span {
    int from, to;
    bool early;
    int first() const { return from / kFrame; }
    int last() const { return (to + kFrame - 1) / kFrame; }
};

// What one row sees of a span.
struct Seen {
    int lo, hi;
    Seen(const VisibleRow& row, const Span& span, int base) : lo((span.early ? row.lo : row.recent) - base), hi(row.hi - base) {
        if (lo < span.from) lo = span.from;
        if (hi > span.to) hi = span.to;
    }
};

struct Spans {
    int n = 0, base;
    Span at[kCut / kFrame / 2 + 2];
    Spans(const VisibleRow* rows, int count, const Cut& cut) : base(cut.number * kCut) {
        for (int i = 0; i < cut.runs; ++i) {
            const Run& run = cut.run[i];
            const Span all{run.first * kFrame, run.last * kFrame, run.early};
            Span some{all.to, all.from, run.early};
            for (int r = 0; r < count; ++r) {
                const Seen seen(rows[r], all, base);
                if (seen.lo >= seen.hi) continue;
                some.from = seen.lo < some.from ? seen.lo : some.from;
                some.to = seen.hi > some.to ? seen.hi : some.to;
            }
            if (some.from < some.to) at[n++] = some;
        }
    }
    const Span* begin() const { return at; }
    const Span* end() const { return at + n; }
};

// The two frames of a tile of 16 positions.
struct Tile {
    const uint8_t *lower, *upper;
};

// The tile of frame f, an even number. A frame that is not in [first, last) is replaced by its neighbour and never looked at.
inline Tile tile_of(const Cut& cut, int f, int first, int last) { return {cut.frames[f < first ? f + 1 : f], cut.frames[f + 1 < last ? f + 1 : f]}; }

// Fetches a head's keys and values of some frames in the order in which they lie in memory, a few lines at a time. They are Cut::kAhead
// bytes ahead of what is computed: half as many were slower for some heads, twice as many for all.
struct FrameFetch {
    const uint8_t* const* frames;
    int left;              // frames
    size_t bytes;          // of the head in a frame
    size_t done = 0;
    void lines(int n) {    // a multiple of 4
        for (int i = 0; i < n && left > 0; i += 4) {
            const uint8_t* p = *frames + done;
            UNROLL for (int line = 0; line < 4; ++line) __builtin_prefetch(p + 64 * line, 0, 2);
            if ((done += 256) < bytes) continue;
            done = 0;
            ++frames;
            --left;
        }
    }
};
