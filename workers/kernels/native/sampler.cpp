// Draws tokens from logits on the CPU: one pass for greedy and for plain temperature sampling, a few passes for top-k,
// top-p and min-p; the vocabulary is never sorted. Also reports log-probabilities with ranks and best alternatives.
// A grammar's mask and adjustments are applied first: one pass copies the row, writes -inf for tokens that the mask
// forbids, and finds every NaN. Called through workers/kernels/cpu_sampler.py; the results are those of its reference,
// workers/kernels/torch_sampler.py. Noise is the function of (seed, position, token id) that workers/sampling/noise.py
// documents. Every form gives the same bits: sums run in lanes of a fixed number and in the order of tokens, and the
// logarithms are logarithms.h's.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "logarithms.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.693147180559945309f;
constexpr float LARGEST_V = 0x1.fffffep-1f;  // 1 - 2^-24
constexpr float LARGEST_NOISE = 22.9f;       // -log(2^-33), rounded up
constexpr int SUMMED_TOKENS = 4096;  // whose weights are summed in float: rounding errors stay near 1e-7
enum Status : uint8_t { OK, NOT_A_NUMBER, INFINITE, MASKED, LATE, OVERFLOWED };  // workers/kernels/protocol.py

// One sequence's parameters: workers/sampling/sampling_state.py, ROW
struct Row {
    int64_t seed;
    const int32_t* tokens;
    const int32_t* stop_ids;
    const int32_t* allowed_ids;
    const int32_t* bad_words;  // each word as its length and its ids
    const int32_t* bias_ids;
    const float* bias_values;
    int32_t num_stop_ids;
    int32_t num_allowed_ids;
    int32_t num_bad_words;
    int32_t num_biases;
    int32_t num_prompt_tokens;
    int32_t min_tokens;
    int32_t top_k;
    float inverse_temperature;  // 0: greedy
    float top_p;
    float log_min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
};

// Mask and adjustments of one row: workers/kernels/cpu_sampler.py, CONSTRAINT
struct Constraint {
    const uint32_t* mask;  // bit t % 32 of word t / 32 allows token t; null: no mask
    const int32_t* adjusted_ids;
    const float* adjusted_by;
    int32_t num_adjusted;
    int32_t late;  // the row is not drawn
};

// ---- Masks: bit i is lane i -----------------------------------------------------------------------------------------

MANTA_INLINE uint32_t bits_of(Ints lanes) {
#if MANTA_LANES == 16
    return _mm512_movepi32_mask((__m512i)lanes);
#elif MANTA_LANES == 8
    return _mm256_movemask_ps((__m256)lanes);
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= uint32_t(lanes[i] & 1) << i;
    return bits;
#endif
}

MANTA_INLINE uint32_t greater(Floats a, Floats b) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    return bits_of(a > b);
#endif
}

MANTA_INLINE uint32_t at_least(Floats a, Floats b) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return bits_of(a >= b);
#endif
}

// Lanes that are NaN or +inf
MANTA_INLINE uint32_t invalid(Floats a) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(INF), _CMP_NLT_UQ);
#else
    return bits_of(~(a < INF));
#endif
}

// Writes the lanes of `mask` one after another and returns their number; up to LANES elements may be overwritten
MANTA_INLINE int compress(uint32_t mask, Floats values, Ints ids, float* values_to, int32_t* ids_to) {
#if MANTA_LANES == 16
    // Into a register, then a plain store: compressing stores are microcoded on some processors
    _mm512_storeu_ps(values_to, _mm512_maskz_compress_ps(mask, (__m512)values));
    _mm512_storeu_si512(ids_to, _mm512_maskz_compress_epi32(mask, (__m512i)ids));
    return __builtin_popcount(mask);
#else
    int count = 0;
    for (; mask; mask &= mask - 1) {
        int lane = __builtin_ctz(mask);
        values_to[count] = values[lane];
        ids_to[count++] = ids[lane];
    }
    return count;
#endif
}

// ---- Tokens to draw from: a whole row of logits, or a list of (logit, id) -------------------------------------------

template <class T>
struct Dense {
    const T* logits;
    int size;
    MANTA_INLINE Ints ids(int i) const { return lane_index() + i; }
    MANTA_INLINE float logit(int i) const { return to_float(logits[i]); }
};

struct Listed {
    float* logits;
    int32_t* token_ids;
    int size;
    MANTA_INLINE Ints ids(int i) const {
        Ints result;
        memcpy(&result, token_ids + i, sizeof(result));
        return result;
    }
};

// Calls body(index, logits, valid lanes); lanes beyond the end are -inf
template <class Tokens, class Body>
MANTA_INLINE void for_each_vector(const Tokens& tokens, Body body) {
    int i = 0;
    for (; i + LANES <= tokens.size; i += LANES) body(i, load(tokens.logits + i));
    if (i < tokens.size) {
        Floats rest = load_part(tokens.logits + i, tokens.size - i);
        body(i, lane_index() < tokens.size - i ? rest : splat(-INF));
    }
}

struct Best {
    float value;
    int32_t id;  // -1: every logit is -inf
    bool is_invalid;
};

// The largest logit, the lowest id among equals, and whether any is NaN or +inf
template <class T>
Best largest(const Dense<T>& tokens) {
    Floats best = splat(-INF);
    Ints best_at = splat_int(0);
    uint32_t bad = 0;
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        bad |= invalid(logits);
        best_at = logits > best ? splat_int(i) : best_at;
        best = maximum(logits, best);
    });
    float value = reduce_max(best);
    int32_t id = std::numeric_limits<int32_t>::max();
    Ints ids = best_at + lane_index();
    for (int lane = 0; lane < LANES; lane++) {
        if (best[lane] == value) id = std::min(id, ids[lane]);
    }
    return {value, value == -INF ? -1 : id, bad != 0};
}

template <class T>
Status why_invalid(const Dense<T>& tokens) {
    for (int i = 0; i < tokens.size; i++) {
        if (std::isnan(tokens.logit(i))) return NOT_A_NUMBER;
    }
    return INFINITE;
}

// ---- Noise ----------------------------------------------------------------------------------------------------------

uint64_t mix64(uint64_t word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 27) * 0x94d049bb133111ebu;
    return word ^ word >> 31;
}

uint64_t noise_key(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    return mix64(mix64(uint64_t(seed) + golden) + (uint64_t(position) + 1) * golden);
}

MANTA_INLINE Words hash(Words token_ids, uint64_t key) {
    Words x = token_ids ^ uint32_t(key);
    x = (x ^ x >> 17) * 0xed5ad4bbu + uint32_t(key >> 32);
    x = (x ^ x >> 11) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x ^ x >> 14;
}

float gumbel(uint32_t word) {
    float v = std::min((float(word) + 0.5f) * 0x1p-32f, LARGEST_V);
    return float(-log_of(-log1p_of(-double(v))));
}

struct Drawn {
    float score;
    float logit;
    int32_t id;  // -1: no token can be drawn
    bool is_invalid;
};

// Not inlined: most vectors never come here, and if it were inlined each of them would store its locals
__attribute__((noinline)) void draw_exactly(uint32_t mask, Floats logits, Floats scaled, Ints ids, Words words,
                                              Drawn& best) {
    for (; mask; mask &= mask - 1) {
        int lane = __builtin_ctz(mask);
        float score = scaled[lane] + gumbel(words[lane]);
        if (score > best.score || (score == best.score && ids[lane] < best.id)) {
            best.score = score;
            best.logit = logits[lane];
            best.id = ids[lane];
        }
    }
}

// Gumbel-max over the tokens whose scaled logit is at least `floor`. For most tokens only a hash and an upper bound of
// the noise are computed: -log(-log1p(-v)) < -log(v), and the bits of a float, read as an integer, are a lower bound of
// its logarithm that is at most 0.06 off. Logarithms are computed only for the few tokens that could still win (about a
// dozen in a row).
template <class Tokens>
Drawn draw(const Tokens& tokens, float scale, float floor, uint64_t key) {
    Drawn best = {-INF, -INF, -1, false};
    Floats threshold = splat(-INF);  // a token whose bound is above it may win
    Floats hopeless = splat(-INF);   // a token whose scaled logit is not above it loses with any noise
    uint32_t bad = 0;
    const float slope = -LN2 * 0x1p-23f;
    const float offset = LN2 * (127 + 32);
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        bad |= invalid(logits);
        Floats scaled = logits * scale;
        if (!greater(scaled, hopeless)) return;
        Ints ids = tokens.ids(i);
        Words words = hash((Words)ids, key);
        Floats v = __builtin_convertvector(words, Floats) + 0.5f;  // times 2^32
        Floats bound = scaled + (__builtin_convertvector((Ints)v, Floats) * slope + offset);
        uint32_t mask = greater(bound, threshold) & at_least(scaled, splat(floor));
        if (__builtin_expect(mask == 0, 1)) return;
        draw_exactly(mask, logits, scaled, ids, words, best);
        float reach = best.score - (1e-4f + 1e-6f * std::fabs(best.score));  // minus the bound's rounding error
        threshold = splat(reach);
        hopeless = splat(reach - LARGEST_NOISE);
    });
    best.is_invalid = bad != 0;
    return best;
}

// ---- Prefixes of the order by (logit descending, id ascending) ------------------------------------------------------

struct Scratch {
    std::vector<float> edited;
    std::vector<float> values;
    std::vector<int32_t> ids;
    std::vector<int32_t> seen;
    std::vector<float> group_maxima;
    std::vector<uint64_t> keys;

    void reserve(int vocab_size) {
        if (int(seen.size()) >= vocab_size) return;
        edited.resize(vocab_size);
        values.resize(vocab_size + LANES);
        ids.resize(vocab_size + LANES);
        seen.assign(vocab_size, 0);
    }
    Listed listed(int size) { return {values.data(), ids.data(), size}; }
};

struct Before {
    int count;     // tokens ordered before the given one; with KEEP they are in the scratch
    double mass;   // sum of exp((logit - shift) * scale) over them
    double total;  // the same sum over all tokens
};

// What is ordered before the token (logit, id). `tokens` may lie in the scratch: writing never overtakes reading.
template <bool KEEP, class Tokens>
Before before(const Tokens& tokens, float logit, int32_t id, float scale, float shift, Scratch& scratch) {
    Before result = {0, 0, 0};
    LaneSums mass = {}, total = {};
    const float scale2 = scale * LOG2E;
    const auto add_up = [&] {
        result.mass += total_of(mass);
        result.total += total_of(total);
        for (int v = 0; v < SUM_VECTORS; v++) mass[v] = total[v] = Floats{};
    };
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        if (i > 0 && i % SUMMED_TOKENS == 0) add_up();
        Ints ids = tokens.ids(i);
        Floats weight = exp2_of<false>((logits - shift) * scale2);
        Ints is_before = (logits > logit) | ((logits == logit) & (ids < id));
        const int v = i / LANES % SUM_VECTORS;
        total[v] += weight;
        mass[v] += (Floats)((Ints)weight & is_before);
        uint32_t mask = bits_of(is_before);
        if (mask) {
            float* values_to = scratch.values.data() + result.count;
            int32_t* ids_to = scratch.ids.data() + result.count;
            if (KEEP) compress(mask, logits, ids, values_to, ids_to);
            result.count += __builtin_popcount(mask);
        }
    });
    add_up();
    return result;
}

uint64_t sort_key(float logit, int32_t id) {
    logit += 0.0f;  // -0 equals 0
    uint32_t word;
    memcpy(&word, &logit, sizeof(word));
    word = word >> 31 ? ~word : word | 0x80000000u;
    return uint64_t(word) << 32 | uint32_t(~id);
}

// A value that at least k logits reach, and not many more do: the k-th largest of the maxima of disjoint groups
template <class T>
float reached_by(const Dense<T>& tokens, int k, Scratch& scratch) {
    int num_vectors = tokens.size / LANES;
    int num_chunks = std::max(4 * k, 512) / LANES;
    int chunk = num_vectors / std::max(num_chunks, 1);
    if (chunk < 4) return -INF;
    scratch.group_maxima.resize(num_chunks * LANES);
    float* maxima = scratch.group_maxima.data();
    for (int first = 0, group = 0; group < num_chunks; first += chunk, group++) {
        Floats best = splat(-INF);
        for (int i = first; i < first + chunk; i++) best = maximum(load(tokens.logits + i * LANES), best);
        store(maxima + group * LANES, best);
    }
    std::nth_element(maxima, maxima + k - 1, maxima + num_chunks * LANES, std::greater<float>());
    return maxima[k - 1];
}

// The k tokens that come first in the order; in the scratch, by ascending id
template <class T>
Listed first_tokens(const Dense<T>& tokens, int k, Scratch& scratch) {
    float enough = reached_by(tokens, k, scratch);
    int count = 0;
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        uint32_t mask = at_least(logits, splat(enough));
        if (i + LANES > tokens.size) mask &= (1u << (tokens.size - i)) - 1;
        if (!mask) return;
        count += compress(mask, logits, tokens.ids(i), scratch.values.data() + count, scratch.ids.data() + count);
    });
    Listed result = scratch.listed(count);
    if (count <= k) return result;
    std::vector<uint64_t>& keys = scratch.keys;
    keys.resize(count);
    for (int i = 0; i < count; i++) keys[i] = sort_key(result.logits[i], result.token_ids[i]);
    std::nth_element(keys.begin(), keys.begin() + k - 1, keys.end(), std::greater<uint64_t>());
    const uint64_t least = keys[k - 1];
    result.size = 0;
    for (int i = 0; i < count; i++) {
        if (sort_key(result.logits[i], result.token_ids[i]) < least) continue;
        result.logits[result.size] = result.logits[i];
        result.token_ids[result.size++] = result.token_ids[i];
    }
    return result;
}

// Draws from the top-p prefix without computing it: a token is in it if the mass before it is less than top_p of all.
// The winner among all tokens nearly always is. If it is not, the tokens before it contain the prefix, and the draw is
// repeated among them.
template <class Tokens>
int32_t draw_top_p(const Tokens& tokens, const Row& row, float largest, float floor, uint64_t key, Scratch& scratch) {
    const float scale = row.inverse_temperature;
    Drawn winner = draw(tokens, scale, floor, key);
    if (row.top_p >= 1 || winner.id < 0) return winner.id;
    Before ahead = before<true>(tokens, winner.logit, winner.id, scale, largest, scratch);
    const double budget = double(row.top_p) * ahead.total;
    while (ahead.mass >= budget && ahead.count > 0) {
        Listed rest = scratch.listed(ahead.count);
        winner = draw(rest, scale, floor, key);
        ahead = before<true>(rest, winner.logit, winner.id, scale, largest, scratch);
    }
    return winner.id;
}

// ---- A row ----------------------------------------------------------------------------------------------------------

template <class T>
Status draw_row(const Dense<T>& tokens, const Row& row, int64_t position, Scratch& scratch, int64_t* token_id) {
    uint64_t key = noise_key(row.seed, position);
    bool plain = row.top_k == 0 && row.top_p >= 1 && row.log_min_p == -INF;
    bool is_invalid;
    int32_t id;
    if (row.inverse_temperature > 0 && plain) {
        Drawn drawn = draw(tokens, row.inverse_temperature, -INF, key);
        id = drawn.id;
        is_invalid = drawn.is_invalid;
    } else {
        Best best = largest(tokens);
        id = best.id;
        is_invalid = best.is_invalid;
        if (row.inverse_temperature > 0 && id >= 0 && !is_invalid) {
            float floor = best.value * row.inverse_temperature + row.log_min_p;
            if (row.top_k > 0) {
                id = draw_top_p(first_tokens(tokens, row.top_k, scratch), row, best.value, floor, key, scratch);
            } else {
                id = draw_top_p(tokens, row, best.value, floor, key, scratch);
            }
        }
    }
    *token_id = is_invalid || id < 0 ? 0 : id;
    if (is_invalid) return why_invalid(tokens);
    return id < 0 ? MASKED : OK;
}

bool has_penalties(const Row& row) {
    return row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0;
}

bool is_edited(const Row& row, int64_t position, const Constraint* constraint) {
    return (constraint && (constraint->mask || constraint->num_adjusted)) || row.num_allowed_ids || row.num_bad_words ||
           row.num_biases || has_penalties(row) ||
           (row.num_stop_ids && position - row.num_prompt_tokens < row.min_tokens);
}

void mask_bad_words(const Row& row, int64_t position, float* logits) {
    int64_t num_output = position - row.num_prompt_tokens;
    const int32_t* word = row.bad_words;
    for (int i = 0; i < row.num_bad_words; i++) {
        int length = *word++;
        int head = length - 1;
        bool ends_output = head <= num_output && std::equal(word, word + head, row.tokens + position - head);
        if (ends_output) logits[word[head]] = -INF;
        word += length;
    }
}

// Counts the tokens in `seen` (1 + occurrences in the output), then visits each once and clears its count. That takes
// about a nanosecond a token: less than keeping counts from step to step, and it is right for any position.
void apply_penalties(const Row& row, int64_t position, int vocab_size, float* logits, int32_t* seen) {
    const int64_t first = row.repetition_penalty == 1 ? row.num_prompt_tokens : 0;
    for (int64_t i = first; i < position; i++) {
        uint32_t id = row.tokens[i];
        if (id >= uint32_t(vocab_size)) continue;
        seen[id] = std::max(seen[id], 1) + (i >= row.num_prompt_tokens);
    }
    for (int64_t i = first; i < position; i++) {
        uint32_t id = row.tokens[i];
        if (id >= uint32_t(vocab_size) || seen[id] == 0) continue;
        int count = seen[id] - 1;
        seen[id] = 0;
        float logit = logits[id];
        logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        if (count > 0) logit -= count * row.frequency_penalty + row.presence_penalty;
        logits[id] = logit;
    }
}

// Writes a float copy of the logits that the mask allows, and -inf for the others. Returns whether any logit, allowed
// or not, is NaN or +inf.
template <class T>
bool copy_allowed(const Dense<T>& raw, const uint32_t* mask, float* logits) {
    uint32_t bad = 0;
    for_each_vector(raw, [&](int i, Floats values) __attribute__((always_inline)) {
        bad |= invalid(values);
        uint32_t allowed = mask[i / 32] >> i % 32;
        Ints bits = (Ints)((splat_int(int32_t(allowed)) >> lane_index()) & 1);
        Floats kept = bits != 0 ? values : splat(-INF);
        if (i + LANES <= raw.size) {
            store(logits + i, kept);
        } else {
            for (int lane = 0; lane < raw.size - i; lane++) logits[i + lane] = kept[lane];
        }
    });
    return bad != 0;
}

// Applies all that comes before the temperature, on a float copy
template <class T>
Dense<float> edit(const Dense<T>& raw, const Row& row, int64_t position, const Constraint* constraint,
                  Scratch& scratch) {
    float* logits = scratch.edited.data();
    const uint32_t* mask = constraint ? constraint->mask : nullptr;  // with a mask the copy has been made
    if (row.num_allowed_ids) {
        std::fill_n(logits, raw.size, -INF);
        for (int i = 0; i < row.num_allowed_ids; i++) {
            int32_t id = row.allowed_ids[i];
            if (!mask || (mask[id / 32] >> id % 32 & 1)) logits[id] = raw.logit(id);
        }
    } else if (!mask) {
        for (int i = 0; i < raw.size; i++) logits[i] = raw.logit(i);
    }
    mask_bad_words(row, position, logits);
    if (position - row.num_prompt_tokens < row.min_tokens) {
        for (int i = 0; i < row.num_stop_ids; i++) logits[row.stop_ids[i]] = -INF;
    }
    for (int i = 0; i < row.num_biases; i++) logits[row.bias_ids[i]] += row.bias_values[i];
    if (has_penalties(row)) apply_penalties(row, position, raw.size, logits, scratch.seen.data());
    for (int i = 0; constraint && i < constraint->num_adjusted; i++) {
        logits[constraint->adjusted_ids[i]] += constraint->adjusted_by[i];
    }
    return {logits, raw.size};
}

// Whether any logit is NaN or +inf. With a mask this also makes the copy that `edit` works on.
template <class T>
bool is_any_invalid(const Dense<T>& raw, const Constraint* constraint, Scratch& scratch) {
    if (constraint && constraint->mask) return copy_allowed(raw, constraint->mask, scratch.edited.data());
    return largest(raw).is_invalid;
}

thread_local Scratch thread_scratch;

template <class T>
void sample(const T* logits, int64_t stride, int num_rows, int vocab_size, const Row* table, const int32_t* table_rows,
            const int64_t* positions, const Constraint* constraints, int64_t* token_ids, uint8_t* status) {
    parallel_each(num_rows, [&](int64_t i) {
        Scratch& scratch = thread_scratch;
        scratch.reserve(vocab_size);
        const Row& row = table[table_rows[i]];
        Dense<T> raw = {logits + i * stride, vocab_size};
        const Constraint* constraint = constraints ? constraints + i : nullptr;
        token_ids[i] = 0;
        if (constraint && constraint->late) {
            status[i] = LATE;
        } else if (!is_edited(row, positions[i], constraint)) {
            status[i] = draw_row(raw, row, positions[i], scratch, token_ids + i);
        } else if (is_any_invalid(raw, constraint, scratch)) {  // a mask must not hide a NaN
            status[i] = why_invalid(raw);
        } else {
            Dense<float> edited = edit(raw, row, positions[i], constraint, scratch);
            Status drawn = draw_row(edited, row, positions[i], scratch, token_ids + i);
            status[i] = drawn == NOT_A_NUMBER || drawn == INFINITE ? OVERFLOWED : drawn;  // the model's were valid
        }
    });
}

template <class T>
void logprobs(const T* logits, int64_t stride, int num_rows, int vocab_size, const int64_t* token_ids, int num_top,
              float* own, int64_t* ranks, int64_t* top_ids, float* top) {
    parallel_each(num_rows, [&](int64_t i) {
        Scratch& scratch = thread_scratch;
        scratch.reserve(vocab_size);
        Dense<T> row = {logits + i * stride, vocab_size};
        float shift = largest(row).value;
        float logit = row.logit(token_ids[i]);
        Before ahead = before<false>(row, logit, token_ids[i], 1, shift, scratch);
        float log_total = float(shift + log_of(ahead.total));
        own[i] = logit - log_total;
        ranks[i] = ahead.count + 1;
        if (num_top == 0) return;
        Listed best = first_tokens(row, num_top, scratch);
        std::vector<uint64_t>& keys = scratch.keys;
        keys.resize(best.size);
        for (int j = 0; j < best.size; j++) keys[j] = sort_key(best.logits[j], best.token_ids[j]);
        std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
        std::fill_n(top_ids + i * num_top, num_top, 0);  // NaN logits have no order, so a row with them may list fewer
        std::fill_n(top + i * num_top, num_top, NAN);
        for (int j = 0; j < best.size; j++) {
            int32_t id = ~uint32_t(keys[j]);
            top_ids[i * num_top + j] = id;
            top[i * num_top + j] = row.logit(id) - log_total;
        }
    });
}

}  // namespace

extern "C" int manta_sampler_layout(int which) {
    return which == 0 ? sizeof(Row) : sizeof(Constraint);
}

// dtype 0: float32, 1: bfloat16. `stride` counts elements between rows of logits; token_ids and status
// [num_rows]; constraints [num_rows] or null.
extern "C" void manta_sample(int dtype, const void* logits, int64_t stride, int num_rows, int vocab_size,
                             const Row* table, const int32_t* table_rows, const int64_t* positions,
                             const Constraint* constraints, int64_t* token_ids, uint8_t* status) {
    if (dtype == 0) {
        sample((const float*)logits, stride, num_rows, vocab_size, table, table_rows, positions, constraints,
               token_ids, status);
    } else {
        sample((const bf16*)logits, stride, num_rows, vocab_size, table, table_rows, positions, constraints,
               token_ids, status);
    }
}

// num_top <= vocab_size; own [num_rows], ranks [num_rows], top_ids and top [num_rows, num_top]
extern "C" void manta_logprobs(int dtype, const void* logits, int64_t stride, int num_rows, int vocab_size,
                               const int64_t* token_ids, int num_top, float* own, int64_t* ranks, int64_t* top_ids,
                               float* top) {
    if (dtype == 0) {
        logprobs((const float*)logits, stride, num_rows, vocab_size, token_ids, num_top, own, ranks, top_ids, top);
    } else {
        logprobs((const bf16*)logits, stride, num_rows, vocab_size, token_ids, num_top, own, ranks, top_ids, top);
    }
}
