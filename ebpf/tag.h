/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The 64-bit tag over payload and header (auth-1): the sum of x * (x >> 32) over all words, x being a word plus its word
 * of the key, closed by SipHash-2-4 over the row's place and that. Its reference is tests/worlds/reference_proof.py.
 *
 * A key is that of an epoch: SipHash's two words, one that only the host uses, one for each word of the header and, from
 * TB_KEY_WORDS on, one for each of the row. A sum has no order, so what is behind the whole rounds of a row can go first.
 */
#ifndef TB_TAG_H
#define TB_TAG_H

#include "compat.h"

#include "check.h"
#include "lanes.h"
#include "wire.h"

#define TB_KEY_HEAD (TB_KEY_WORDS - TB_HEADER_BYTES / 8)

static __always_inline __u64 tb_tag_word(__u64 word, __u64 key)
{
	__u64 x = word + key;

	return x * (x >> 32);
}

#define TB_ROTATED(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define TB_SIP_ROUND                          \
	do {                                  \
		v0 += v1;                     \
		v1 = TB_ROTATED(v1, 13) ^ v0; \
		v0 = TB_ROTATED(v0, 32);      \
		v2 += v3;                     \
		v3 = TB_ROTATED(v3, 16) ^ v2; \
		v0 += v3;                     \
		v3 = TB_ROTATED(v3, 21) ^ v0; \
		v2 += v1;                     \
		v1 = TB_ROTATED(v1, 17) ^ v2; \
		v2 = TB_ROTATED(v2, 32);      \
	} while (0)
#define TB_SIP_TAKE(word)     \
	do {                  \
		v3 ^= (word); \
		TB_SIP_ROUND; \
		TB_SIP_ROUND; \
		v0 ^= (word); \
	} while (0)

/* SipHash's state after a row's place: it can be had before the hash is known, and what follows is the shorter. */
struct tb_tag_state {
	__u64 v0, v1, v2, v3;
};

static __always_inline void tb_tag_open(struct tb_tag_state *s, const struct tb_header *head,
					const __u64 *key)
{
	__u64 place = (__u64)tb_be32(head->op) << 32 | tb_be32(head->seq);
	__u64 v0 = key[0] ^ 0x736f6d6570736575ULL, v1 = key[1] ^ 0x646f72616e646f6dULL;
	__u64 v2 = key[0] ^ 0x6c7967656e657261ULL, v3 = key[1] ^ 0x7465646279746573ULL;

	TB_SIP_TAKE(place);
	s->v0 = v0;
	s->v1 = v1;
	s->v2 = v2;
	s->v3 = v3;
}

/* SipHash-2-4 of op, seq and a hash. */
static __always_inline __u64 tb_tag_close(const struct tb_tag_state *s, __u64 hash)
{
	__u64 v0 = s->v0, v1 = s->v1, v2 = s->v2, v3 = s->v3;

	TB_SIP_TAKE(hash);
	TB_SIP_TAKE(16ULL << 56);
	v2 ^= 0xff;
	TB_SIP_ROUND;
	TB_SIP_ROUND;
	TB_SIP_ROUND;
	TB_SIP_ROUND;
	return v0 ^ v1 ^ v2 ^ v3;
}

/* The header's part of the hash; what it says of itself in the place of the tag is the payload's length. */
static __always_inline __u64 tb_tag_head(const struct tb_header *head, __u64 length,
					 const __u64 *key)
{
	__u64 hash = tb_tag_word(length, key[TB_KEY_WORDS - 1]);
	int i;

#pragma unroll
	for (i = 0; i < TB_HEADER_BYTES / 8 - 1; i++)
		hash += tb_tag_word(tb_word(head, i), key[TB_KEY_HEAD + i]);
	return hash;
}

#ifndef TB_USER
/* clang-format off */
/* A word of codes in t into the hash; [k] is where the round's key begins. */
#define TB_TAG_MIX(code) \
	"%[u] = *(u64 *)(%[k] + " code ")\n" \
	"%[u] += %[t]\n" \
	"%[v] = %[u]\n" \
	"%[v] >>= 32\n" \
	"%[u] *= %[v]\n" \
	"%[h] += %[u]\n"
#define TB_TAG_WORD(back, code) \
	"%[t] = *(u64 *)(%[q] - " back ")\n" \
	"%[t] = le64 %[t]\n" \
	TB_TAG_MIX(code)
/* All whole rounds of a row; n counts those that are not there. */
#define TB_TAG_ROUNDS \
	asm volatile("tb_round_%=:\n" \
		     "if %[q] > %[end] goto tb_done_%=\n" \
		     TB_TAG_WORD("64", "0") \
		     TB_TAG_WORD("56", "8") \
		     TB_TAG_WORD("48", "16") \
		     TB_TAG_WORD("40", "24") \
		     TB_TAG_WORD("32", "32") \
		     TB_TAG_WORD("24", "40") \
		     TB_TAG_WORD("16", "48") \
		     TB_TAG_WORD("8", "56") \
		     "%[q] += 64\n" \
		     "%[k] += 64\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     "tb_done_%=:\n" \
		     : [q] "+r"(q), [n] "+r"(n), [t] "=&r"(t), [u] "=&r"(u), [v] "=&r"(v), \
		       [h] "+r"(h), [k] "+r"(k) \
		     : [end] "r"(end) \
		     : "memory")
/* clang-format on */
#endif

/* The hash of a packet of whatever length: codes up to end, and the header. */
static __always_inline __u64 tb_tag_hash(const struct tb_header *head, const void *codes,
					 const void *end, const __u64 *key)
{
	__u64 whole = tb_lanes_whole(codes, end), n = TB_WIDTH / TB_CHECK_ROUND, t, u, v;
	__u64 h = tb_tag_head(head, (__u64)(end - codes), key);
	const void *q = codes + TB_CHECK_ROUND;
	const __u64 *k = key + TB_KEY_WORDS;
	int i;

	if (whole <= TB_LANES_MOST) {
		const void *rest = codes + whole;
		const __u64 *behind = k + whole / 8;

#pragma clang loop unroll(disable)
		for (i = 0; i < TB_CHECK_ROUND / TB_ROW_STEP - 1; i++) {
			if (rest + TB_ROW_STEP > end)
				break;
			h += tb_tag_word(tb_word(rest, 0), behind[0]);
			h += tb_tag_word(tb_word(rest, 1), behind[1]);
			rest += TB_ROW_STEP;
			behind += TB_ROW_STEP / 8;
		}
	}

	TB_TAG_ROUNDS;
	return h;
}

/* A hash after header word i (a constant) became another one. */
static __always_inline __u64 tb_tag_moved(__u64 hash, int i, __u64 before, __u64 now,
					  const __u64 *key)
{
	return hash + tb_tag_word(now, key[TB_KEY_HEAD + i]) -
	       tb_tag_word(before, key[TB_KEY_HEAD + i]);
}

#endif /* TB_TAG_H */
