#include "frames.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace mill {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[frames] " + what); }

size_t product(size_t a, size_t b) {
    size_t result;
    if (__builtin_mul_overflow(a, b, &result)) refuse("a pool is larger than memory can be");
    return result;
}

}  // namespace

FrameStream::FrameStream(const FrameGrid& grid, size_t pool_bytes, std::span<const GroupFrames> groups) : slot_stride_(grid.slot_stride) {
    const size_t piece = grid.piece_bytes, slot = product(piece, grid.frames);
    if (piece == 0 || slot > grid.slot_stride) refuse("slots overlap, or frames have no bytes");
    for (const GroupFrames& g : groups) {
        if (g.slots && (slot > pool_bytes || product(g.slots - 1, grid.slot_stride) > pool_bytes - slot)) refuse("a group has " + std::to_string(g.slots) + " slots, which end after the pool");
        Group group{bytes_, 0, product(piece, g.numbers.size()), {}};
        size_t at = 0;
        for (int32_t number : g.numbers) {
            if (number < 0 || size_t(number) >= grid.frames) refuse("frame " + std::to_string(number) + " is not in a pool of " + std::to_string(grid.frames));
            const size_t offset = piece * size_t(number);
            if (group.runs.empty() || group.runs.back().offset + (at - group.runs.back().at) != offset) group.runs.push_back({at, at, offset});
            group.runs.back().end = at += piece;
        }
        group.end = bytes_ += product(group.slot_bytes, g.slots);
        if (group.end > group.begin) groups_.push_back(std::move(group));
    }
}

void FrameStream::require(size_t begin, size_t count) const {
    if (begin > bytes_ || count > bytes_ - begin) throw std::out_of_range("[frames] bytes [" + std::to_string(begin) + ", +" + std::to_string(count) + ") of " + std::to_string(bytes_));
}

// visit(offset in the pool, offset in the stream, bytes) for each piece of memory that holds some of [begin, begin + count).
template <class Visit> void FrameStream::walk(size_t begin, size_t count, Visit visit) const {
    require(begin, count);
    const size_t end = begin + count;
    for (const Group& g : groups_) {
        if (g.end <= begin) continue;
        while (begin < end && begin < g.end) {
            const size_t slot = (begin - g.begin) / g.slot_bytes, slot_begin = g.begin + slot * g.slot_bytes;
            const size_t first = begin - slot_begin, last = std::min(end - slot_begin, g.slot_bytes);
            auto run = std::upper_bound(g.runs.begin(), g.runs.end(), first, [](size_t at, const Run& r) { return at < r.end; });
            for (size_t at = first; at < last; ++run) {
                const size_t n = std::min(run->end, last) - at;
                visit(slot * slot_stride_ + run->offset + (at - run->at), slot_begin + at, n);
                at += n;
            }
            begin = slot_begin + last;
        }
        if (begin == end) return;
    }
}

void FrameStream::gather(const uint8_t* pool, size_t begin, size_t count, uint8_t* out) const {
    walk(begin, count, [=](size_t offset, size_t at, size_t n) { std::memcpy(out + (at - begin), pool + offset, n); });
}

void FrameStream::scatter(uint8_t* pool, size_t begin, size_t count, const uint8_t* data) const {
    walk(begin, count, [=](size_t offset, size_t at, size_t n) { std::memcpy(pool + offset, data + (at - begin), n); });
}

void FrameStream::copy(uint8_t* pool, size_t begin, size_t count, const uint8_t* other_pool, const FrameStream& other) const {
    if (other.bytes_ != bytes_) refuse("a stream of " + std::to_string(other.bytes_) + " bytes does not fill one of " + std::to_string(bytes_));
    walk(begin, count, [&](size_t offset, size_t at, size_t n) { other.gather(other_pool, at, n, pool + offset); });
}

}  // namespace mill
