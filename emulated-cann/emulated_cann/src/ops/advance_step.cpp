// The next step of vLLM's sequences.
#include "numeric.h"

namespace {

using namespace emulator;

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_advance_step_flashattn.md");
void check(InOut tokens, In sampled, InOut positions, InOut lengths, InOut slots, In table, int64_t sequences,
           int64_t queries, int64_t block) {
    require(sequences > 0 && queries > 0 && block > 0, "num_seqs, num_queries and block_size must be positive");
    require(sequences > queries, "num_seqs, " + std::to_string(sequences) + ", must be greater than num_queries, " +
                                     std::to_string(queries));
    for (const In* each : std::initializer_list<const In*>{&tokens, &positions, &lengths, &slots}) {
        require_dtype(*each, {at::kLong}, "the tensors");
        require_shape(*each, {sequences}, "input_tokens, input_positions, seq_lens and slot_mapping");
    }
    require_dtype(sampled, {at::kLong}, "sampled_token_ids");
    require_shape(sampled, {queries, 1}, "sampled_token_ids");
    require_dtype(table, {at::kLong}, "block_tables");
    require(table.dim() == 2 && table.size(0) == sequences,
            "block_tables must have a row for each sequence, but has shape " + shown(table.sizes()));
}

void AdvanceStep(InOut tokens, In sampled, InOut positions, InOut lengths, InOut slots, In table, int64_t,
                 int64_t queries, int64_t block) {
    auto first = [&](const InOut& of) { return of.raw().narrow(0, 0, queries); };
    auto places = first(lengths).clone(), blocks = at::div(places, block, "floor");  // the new token's position
    UNDEFINED("a kernel would read outside its inputs");
    if ((blocks >= table.size(1)).any().item<bool>())
        throw std::runtime_error("block_tables must have more columns than seq_lens / block_size");
    first(tokens).copy_(sampled.raw().squeeze(1));
    first(positions).copy_(places);
    first(lengths).add_(1);
    auto found = table.raw().narrow(0, 0, queries).gather(1, blocks.unsqueeze(1)).squeeze(1);
    first(slots).copy_(found * block + places.remainder(block));
}

void check_v2(InOut tokens, In sampled, InOut positions, InOut lengths, InOut slots, In table, In speculated,
              In accepted, int64_t sequences, int64_t queries, int64_t block) {
    if (speculated || accepted) throw NotEmulated("steps with speculated tokens are not emulated");
    check(tokens, sampled, positions, lengths, slots, table, sequences, queries, block);
}

void AdvanceStepV2(InOut tokens, In sampled, InOut positions, InOut lengths, InOut slots, In table, In, In,
                   int64_t sequences, int64_t queries, int64_t block) {
    AdvanceStep(tokens, sampled, positions, lengths, slots, table, sequences, queries, block);
}

}  // namespace

ACLNN(AdvanceStep, .check = check)
ACLNN(AdvanceStepV2, .check = check_v2)
