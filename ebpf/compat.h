/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every include of the sources, for two compilers of BPF: BCC (TB_BCC defined; kernel-internal headers, so
 * only uapi/ ones, and never uapi/linux/in.h, which clashes with what BCC puts in front) and clang with
 * libbpf's headers; and for the library of the udp datapath (TB_USER defined; host_lib/core). Also byte order, without
 * asking any of them for its macros.
 */
#ifndef TB_COMPAT_H
#define TB_COMPAT_H

#if defined(TB_USER)
#include "user.h"
#elif defined(TB_BCC)
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/ip.h>
#include <uapi/linux/ipv6.h>
#include <uapi/linux/udp.h>
#define TB_PROGRAM int
#define TB_CLASSIFIER int
#define TB_DEVMAP_PROGRAM int
#else
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>
#define TB_PROGRAM SEC("xdp") int
#define TB_CLASSIFIER SEC("tc") int
#define TB_DEVMAP_PROGRAM SEC("xdp/devmap") int
#endif

#define TB_IPPROTO_UDP 17
/* Number of the helper: BCC and libbpf declare it under different names. */
#define TB_TAIL_CALL 12

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define tb_be16(x) __builtin_bswap16(x)
#define tb_be32(x) __builtin_bswap32(x)
#define tb_be64(x) __builtin_bswap64(x)
#define tb_le64(x) (x)
#else
#define tb_be16(x) (x)
#define tb_be32(x) (x)
#define tb_be64(x) (x)
#define tb_le64(x) __builtin_bswap64(x)
#endif

/* Eight bytes of whatever type: headers are read both by field and by word. */
typedef __u64 __attribute__((may_alias)) tb_u64;

/* A value that another CPU or the host may change: read or written once, where it stands. */
#define TB_READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define TB_WRITE_ONCE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))

/* What comes to the common packet, so that its way is laid out in one piece. */
#define tb_likely(x) __builtin_expect(!!(x), 1)

/* Signed distance of two serial numbers. */
static __always_inline __s32 tb_distance(__u32 a, __u32 b)
{
	return (__s32)(a - b);
}

#endif /* TB_COMPAT_H */
