// Where refusals come from, which the documentation lists; see refusals.py. Each of these lines holds for what is
// refused after it, up to the end of its block or the next one. A refusal without one fails a test.
#pragma once

// CANN demands it, or torch_npu does: what says so, as "repository: path (remark)", or "repository@revision: path" if
// it is not so in all releases. Semicolons separate several. The repositories are CANN's and Ascend's at gitcode.com.
#define DOCUMENTED(documents) static_assert(sizeof(documents) > 1)

// The documents leave open what happens then, and hardware may do anything: why it is refused here.
#define UNDEFINED(reason) static_assert(sizeof(reason) > 1)

// Neither: a limit of the emulated CANN, or what the program asked it for. What it is. Operations throw NotEmulated for
// the former, which needs no such line.
#define OURS(what) static_assert(sizeof(what) > 1)
