// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The worker's program for a job with a key: the same rules, with a tag in the place of the check (auth-1). The worker's
 * program hands every packet over to it as long as the control record says so: jobs without a key run no instruction of
 * it, and the verifier looks at each program by itself.
 */
#define TB_TAGGED 1

#include "receive.h"

TB_PROGRAM tb_tagged(struct xdp_md *ctx)
{
	return tb_receive(ctx);
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
