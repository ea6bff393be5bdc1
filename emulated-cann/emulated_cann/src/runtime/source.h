// Statements that name the source of refusals, for the documentation; see read_refusals.py. Each applies to the
// refusals after it, up to the end of its block or the next statement. A refusal without one fails a test.
#pragma once

// CANN or torch_npu documents the rule. The argument names the document as "repository: path (remark)", or
// "repository@revision: path" if the rule does not apply to all releases. Semicolons separate documents. The
// repositories are CANN's and Ascend's at gitcode.com.
#define DOCUMENTED(documents) static_assert(sizeof(documents) > 1)

// The documents do not define the behavior. The argument says what hardware may do.
#define UNDEFINED(reason) static_assert(sizeof(reason) > 1)

// A limit of the emulated CANN, or a request of the program. The argument describes it. Operations throw NotEmulated
// for limits, which need no statement.
#define OURS(limit) static_assert(sizeof(limit) > 1)
