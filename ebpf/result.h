/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The state machine of a result row (kernel-17); all of it runs under the row's lock. */
#ifndef TB_RESULT_H
#define TB_RESULT_H

#include "compat.h"

#include "abi.h"
#include "packet.h"
#include "window.h"

static __always_inline __u32 tb_result_judge(const struct tb_control *control,
					     const struct tb_result *record,
					     const struct tb_packet *p, __u32 place)
{
	__u32 tag = tb_tag(p->cookie, p->op, record->cookie, record->op);

	if (tag == TB_TAG_SAME)
		return p->flags & TB_FLAG_REPEAT ? TB_VERDICT_DUPLICATE_REPAIR_RESULT
						 : TB_VERDICT_DUPLICATE_RESULT;
	if (!tb_likely(place == TB_INSIDE))
		return place == TB_BEHIND ? TB_VERDICT_STALE_RESULT : TB_VERDICT_FUTURE_RESULT;
	if (tag == TB_TAG_NEWER)
		return TB_VERDICT_STALE_RESULT;
	return tb_likely(tb_over(control, record->cookie, record->op)) ? TB_VERDICT_RESULT_TAKEN
								       : TB_VERDICT_FUTURE_RESULT;
}

static __always_inline void tb_result_take(struct tb_result *record, const struct tb_packet *p,
					   const struct tb_header *head)
{
	record->cookie = p->cookie;
	record->op = p->op;
	record->scale = tb_be32(head->scale);
	record->count = tb_be16(head->count);
	record->exponent = (__s16)tb_be16(head->exponent);
	record->owner = p->owner;
	record->row = p->row;
	record->flags = tb_be16(head->flags);
}

#endif /* TB_RESULT_H */
