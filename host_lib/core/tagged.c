// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The worker's program for a process, with a tag in the place of the check (auth-1). */
#define TB_TAGGED 1

#include "ingest.h"

#include "core.h"

TB_FOR_PROCESSORS int tb_tagged(struct xdp_md *ctx)
{
	return tb_ingest(ctx);
}
