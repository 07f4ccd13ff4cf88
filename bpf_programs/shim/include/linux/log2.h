#pragma once
#define roundup_pow_of_two(n) ((n) <= 1 ? 1UL : (1UL << (64 - __builtin_clzl((n) - 1UL))))
