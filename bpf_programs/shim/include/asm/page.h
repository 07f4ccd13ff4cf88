#pragma once
#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif
