// SPDX-License-Identifier: Apache-2.0
/*
 * Masks over a whole chunk. LOW_n has n bits clear, n bits set, and so on: all ones divided by 2^n + 1.
 */
#ifndef TB_MASKS_P4
#define TB_MASKS_P4

#include "sizes.p4"

const chunk_t ALL = ~2048w0;
const chunk_t LOW_8 = ALL / ((1 << 8) + 1);
const chunk_t LOW_16 = ALL / ((1 << 16) + 1);
const chunk_t LOW_32 = ALL / ((1 << 32) + 1);
const chunk_t LOW_64 = ALL / ((1 << 64) + 1);
const chunk_t LOW_128 = ALL / ((1 << 128) + 1);
const chunk_t LOW_256 = ALL / ((1 << 256) + 1);

/* 1 in each of the 16 lanes of 128 bits; the uppermost lane of a product with it is the sum of all lanes. */
const chunk_t SUM_128 = ALL / ((1 << 128) - 1);
/* 1, 2, ..., 16 from the uppermost lane down: in the product's uppermost lane, lane k from below counts k + 1 times. */
const chunk_t RAMP_128 = 17 * SUM_128 - SUM_128 * SUM_128;

#endif
