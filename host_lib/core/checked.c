// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The worker's program for a process; tagged.c is the same for a job with a key. */
#include "ingest.h"

#include "core.h"

TB_FOR_PROCESSORS int tb_checked(struct xdp_md *ctx)
{
	return tb_ingest(ctx);
}
