// Draws tokens from logits on the CPU: one pass for greedy and for plain temperature sampling, a few passes for top-k,
// top-p and min-p. Also reports log-probabilities with ranks and best alternatives. A row is edited (logit_edits.h),
// ordered as far as needed (token_order.h), and drawn from (gumbel.h). Called through workers/kernels/cpu_sampler.py; the
// results are those of its reference, workers/kernels/torch_sampler.py. Every form gives the same bits: sums run in
// lanes of a fixed number and in the order of tokens, and the logarithms are logarithms.h's.
#include <algorithm>
#include <vector>

#include "gumbel.h"
#include "logit_edits.h"
#include "parallel.h"
#include "row_tokens.h"
#include "token_order.h"

namespace {

// Draws from the top-p prefix without computing it: a token is in it if the mass before it is less than top_p of all.
// The winner among all tokens nearly always is. If it is not, the tokens before it contain the prefix, and the draw is
// repeated among them.
template <class Tokens>
int32_t draw_top_p(const Tokens& tokens, const Row& row, float largest, float floor, uint64_t key, TokenScratch& scratch) {
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

template <class T>
Status draw_row(const Dense<T>& tokens, const Row& row, int64_t position, TokenScratch& scratch, int64_t* token_id) {
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

thread_local TokenScratch thread_scratch;

template <class T>
void sample(const T* logits, int64_t stride, int num_rows, int vocab_size, const Row* table, const int32_t* table_rows,
            const int64_t* positions, const Constraint* constraints, int64_t* token_ids, uint8_t* status) {
    parallel_each(num_rows, [&](int64_t i) {
        TokenScratch& scratch = thread_scratch;
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
        TokenScratch& scratch = thread_scratch;
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
