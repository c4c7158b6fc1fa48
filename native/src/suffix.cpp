#include "suffix.h"

#include <algorithm>
#include <stdexcept>

namespace mill {

SuffixIndex::SuffixIndex(int depth) : depth_(depth) {
    if (depth < 1) throw std::invalid_argument("[suffix] the depth must be positive");
    add(0, kNone);
}

void SuffixIndex::extend(std::span<const int32_t> tokens) {
    for (int32_t token : tokens) append(token);
}

void SuffixIndex::end() {
    append(kEnd);
    for (; newest_ != kRoot; newest_ = states_[newest_].link, ++work_) ++states_[newest_].followed;   // by nothing, but count() takes these for occurrences
}

size_t SuffixIndex::bytes() const {
    return sizeof *this + states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + slots_.capacity() * sizeof(int32_t);
}

// ---- edges: the first lies in its state, which seldom has another

size_t SuffixIndex::slot(int32_t state, int32_t token) const {
    uint64_t h = (uint64_t(uint32_t(state)) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15ull;
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93ull;
    const size_t mask = slots_.size() - 1;
    size_t i = size_t(h >> 32) & mask;
    while (slots_[i] != kNone && (edges_[slots_[i]].state != state || edges_[slots_[i]].token != token)) i = (i + 1) & mask;
    return i;
}

void SuffixIndex::rehash() {
    slots_.assign(std::max<size_t>(8, slots_.size() * 2), kNone);
    for (size_t e = 0; e < edges_.size(); ++e) slots_[slot(edges_[e].state, edges_[e].token)] = int32_t(e);
}

int32_t SuffixIndex::find(int32_t state, int32_t token) const {
    const State& s = states_[state];
    if (s.target != kNone && s.token == token) return s.target;
    if (s.more == kNone) return kNone;
    const int32_t edge = slots_[slot(state, token)];
    return edge == kNone ? kNone : edges_[edge].target;
}

int32_t& SuffixIndex::target_of(int32_t state, int32_t token) {
    State& s = states_[state];
    return s.token == token ? s.target : edges_[slots_[slot(state, token)]].target;
}

void SuffixIndex::connect(int32_t state, int32_t token, int32_t target) {
    State& s = states_[state];
    if (s.target == kNone) {
        s.token = token;
        s.target = target;
        return;
    }
    if (2 * (edges_.size() + 1) > slots_.size()) rehash();
    slots_[slot(state, token)] = int32_t(edges_.size());
    edges_.push_back({state, token, target, s.more});
    s.more = int32_t(edges_.size()) - 1;
}

// ---- growing

int32_t SuffixIndex::add(int32_t length, int32_t link) {
    states_.push_back({length, link, 0, kNone, kNone, 0, 0, 0});
    return int32_t(states_.size()) - 1;
}

// Those strings of a state that continue `before` have occurred once more: they become a state of their own, with the past of the others.
int32_t SuffixIndex::split(int32_t state, int32_t before, int32_t token) {
    State copy = states_[state];
    copy.length = states_[before].length + 1;
    copy.more = kNone;
    const int32_t shorter = int32_t(states_.size());
    states_.push_back(copy);
    for (int32_t e = states_[state].more; e != kNone; e = edges_[e].next, ++work_) connect(shorter, edges_[e].token, edges_[e].target);
    states_[state].link = shorter;
    for (int32_t p = before; p != kNone && find(p, token) == state; p = states_[p].link, ++work_) target_of(p, token) = shorter;
    return shorter;
}

// Makes the automaton know the newest string with one more token; returns its state.
int32_t SuffixIndex::grow(int32_t token) {
    int32_t known = newest_;
    int32_t made = kNone;
    if (find(known, token) == kNone) {
        made = add(states_[newest_].length + 1, kRoot);
        for (; known != kNone && find(known, token) == kNone; known = states_[known].link, ++work_) connect(known, token, made);
        if (known == kNone) return made;
    }
    int32_t to = find(known, token);
    // Strings that are cut off need not be told apart.
    if (states_[to].length != states_[known].length + 1 && states_[known].length <= depth_) to = split(to, known, token);
    if (made == kNone) return to;
    states_[made].link = to;
    return made;
}

// Every suffix of the string has been followed by `token`; after: the state of the string with it.
void SuffixIndex::count(int32_t before, int32_t after, int32_t token) {
    for (int32_t p = before; p != kNone; p = states_[p].link, ++work_) {
        State& s = states_[p];
        while (states_[after].link != kNone && states_[states_[after].link].length > s.length) after = states_[after].link, ++work_;
        ++s.followed;
        if (s.best_count > 0 && s.best == token) {
            ++s.best_count;
        } else if (const int32_t times = states_[after].followed + 1; times >= s.best_count) {   // once more than it was followed: just now
            s.best = token;
            s.best_count = times;
        }
    }
}

void SuffixIndex::append(int32_t token) {
    const int32_t before = newest_, after = grow(token);
    count(before, after, token);
    newest_ = after;
    while (states_[newest_].link != kNone && states_[states_[newest_].link].length > depth_) newest_ = states_[newest_].link, ++work_;
}

// ---- looking up

// The longest suffix of a match that has been followed by something.
SuffixIndex::Match SuffixIndex::followed(Match match) const {
    while (match.state != kRoot && states_[match.state].followed == 0) {
        match.state = states_[match.state].link;
        match.length = states_[match.state].length;
    }
    return match;
}

// The longest suffix, of at most `depth` tokens, of a match with one more token.
SuffixIndex::Match SuffixIndex::step(Match match, int32_t token) const {
    int32_t to;
    while ((to = find(match.state, token)) == kNone) {
        if (match.state == kRoot) return {kRoot, 0};
        match.state = states_[match.state].link;
        match.length = states_[match.state].length;
    }
    match = {to, std::min(match.length + 1, depth_)};
    while (states_[states_[match.state].link].length >= match.length) match.state = states_[match.state].link;
    return match;
}

SuffixDraft SuffixIndex::draft(std::span<const int32_t> context, int most, double floor, std::span<const double> trust) const {
    if (trust.size() != size_t(depth_) + 1) throw std::invalid_argument("[suffix] trust must be given for lengths of 0 to the depth");
    Match match{kRoot, 0};
    for (int32_t token : context.last(std::min(context.size(), size_t(depth_)))) match = step(match, token);
    SuffixDraft draft;
    double odds = 1;
    for (int i = 0; i < most; ++i) {
        match = followed(match);
        if (match.state == kRoot) break;
        const State& s = states_[match.state];
        const double share = double(s.best_count) / s.followed;
        odds *= share * trust[match.length];
        if (s.best == kEnd || (i > 0 && odds < floor)) break;
        draft.tokens.push_back(s.best);
        draft.shares.push_back(share);
        draft.matches.push_back(match.length);
        draft.expected += odds;
        match = step(match, s.best);
    }
    return draft;
}

}  // namespace mill
