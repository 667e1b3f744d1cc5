/* AMX for processors without it: a preloaded library that executes the tile instructions that fault.

   A tile instruction raises SIGILL; the handler decodes it, executes it on tiles of the thread in software, and goes on
   behind it. Whatever it does not know, and what a processor would refuse, ends the process with a sentence: nothing
   passes here that real tiles would not do. The request for the permission (arch_prctl) is answered, too, and tiles
   used without it are an error.

   AMX_EMULATOR_FAULT makes a bad processor: "refuse" the permission, "illegal" first instruction, "hang", "wrong" numbers.

   After Intel's Architecture Instruction Set Extensions, chapter 3, and SDM volume 2, VEX prefixes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { NUM_TILES = 8, MOST_ROWS = 16, ROW_BYTES = 64 };

struct tile {
    int rows, row_bytes;
    uint8_t data[MOST_ROWS][ROW_BYTES];
};

static __thread struct tile tiles[NUM_TILES];
static __thread int is_configured;
static int is_permitted;
static const char *fault = "";

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static int fault_is(const char *name) { return strcmp(fault, name) == 0; }

static _Noreturn void fail(const char *what, const uint8_t *code) {
    char text[256];
    int length = snprintf(text, sizeof text, "AMX emulator: %s:", what);
    for (int i = 0; i < 12; i++) length += snprintf(text + length, sizeof text - length, " %02x", code[i]);
    text[length++] = '\n';
    if (write(2, text, length) < 0) _exit(98);
    _exit(97);
}

static void check(int is_right, const char *what, const uint8_t *code) {
    if (!is_right) fail(what, code);
}

/* A decoded instruction: C4, two bytes of prefix, opcode, ModRM, and SIB and displacement where there is memory. */
struct instruction {
    const uint8_t *code;
    int prefix; /* 0 none, 1 66, 2 F3, 3 F2 */
    int opcode, reg, rm, vvvv;
    int is_memory, has_sib;
    uint64_t address, stride;
    int length;
};

static struct instruction decode(const uint8_t *code, const greg_t *registers) {
    struct instruction one = {.code = code};
    check(code[0] == 0xc4, "not a three-byte VEX prefix", code);
    check((code[1] & 0x1f) == 2, "not the opcode map 0F38", code);
    check((code[2] & 0x84) == 0, "VEX.W or VEX.L is not 0", code);
    one.prefix = code[2] & 3;
    one.vvvv = ~code[2] >> 3 & 15;
    one.opcode = code[3];
    int extend_reg = ~code[1] >> 7 & 1, extend_index = ~code[1] >> 6 & 1, extend_base = ~code[1] >> 5 & 1;
    int modrm = code[4], mod = modrm >> 6, rm = modrm & 7;
    check(!extend_reg, "a tile or an extension above 7", code);
    one.reg = modrm >> 3 & 7;
    one.is_memory = mod != 3;
    one.length = 5;
    if (!one.is_memory) {
        check(!extend_base, "a tile above 7", code);
        one.rm = rm;
        return one;
    }
    int base = rm + 8 * extend_base, has_base = 1;
    if (rm == 4) {
        int sib = code[one.length++], index = (sib >> 3 & 7) + 8 * extend_index;
        one.has_sib = 1;
        base = (sib & 7) + 8 * extend_base;
        has_base = !((sib & 7) == 5 && mod == 0);
        one.stride = index == 4 ? 0 : (uint64_t)registers[REGISTERS[index]] << (sib >> 6);
    } else {
        check(!(rm == 5 && mod == 0), "an address relative to the instruction", code);
    }
    int32_t displacement = 0;
    if (mod == 1) {
        displacement = (int8_t)code[one.length++];
    } else if (mod == 2 || !has_base) {
        memcpy(&displacement, code + one.length, 4);
        one.length += 4;
    }
    one.address = (has_base ? (uint64_t)registers[REGISTERS[base]] : 0) + (int64_t)displacement;
    return one;
}

static void load_config(const struct instruction *one) {
    const uint8_t *bytes = (const uint8_t *)(one->address + (one->has_sib ? one->stride : 0));
    check(is_permitted, "ldtilecfg: the permission to use tiles was not asked for", one->code);
    check(!is_configured, "ldtilecfg: whoever used the tiles before has not released them", one->code);
    check(bytes[0] == 1, "ldtilecfg: the palette is not 1", one->code);
    for (int i = 1; i < 64; i++) {
        int is_reserved = i < 16 || (i >= 16 + 2 * NUM_TILES && i < 48) || i >= 48 + NUM_TILES;
        check(!is_reserved || bytes[i] == 0, "ldtilecfg: a reserved byte is not 0", one->code);
    }
    memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < NUM_TILES; i++) {
        tiles[i].row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
        tiles[i].rows = bytes[48 + i];
        check(tiles[i].row_bytes <= ROW_BYTES && tiles[i].rows <= MOST_ROWS, "ldtilecfg: a tile is too large", one->code);
        check(!tiles[i].rows == !tiles[i].row_bytes, "ldtilecfg: rows without bytes, or bytes without rows", one->code);
    }
    is_configured = 1;
}

static struct tile *used(int number, const struct instruction *one) {
    check(is_configured && number < NUM_TILES && tiles[number].rows > 0, "a tile without a size", one->code);
    return &tiles[number];
}

static void load_tile(const struct instruction *one) {
    struct tile *to = used(one->reg, one);
    memset(to->data, 0, sizeof to->data);
    for (int row = 0; row < to->rows; row++)
        memcpy(to->data[row], (const void *)(one->address + row * one->stride), to->row_bytes);
}

static void store_tile(const struct instruction *one) {
    const struct tile *from = used(one->reg, one);
    for (int row = 0; row < from->rows; row++)
        memcpy((void *)(one->address + row * one->stride), from->data[row], from->row_bytes);
}

/* What an operand's bytes are: of the left one signed in tdpbsud and tdpbssd, of the right one in tdpbusd and tdpbssd. */
static int value_of(uint8_t byte, int is_signed) { return is_signed ? (int8_t)byte : byte; }

static void add_product(const struct instruction *one) {
    struct tile *total = used(one->reg, one);
    const struct tile *left = used(one->rm, one), *right = used(one->vvvv, one);
    int left_is_signed = one->prefix >= 2, right_is_signed = one->prefix & 1;
    check(total != left && total != right && left != right, "a product of one tile with itself", one->code);
    check(left->row_bytes % 4 == 0 && total->row_bytes % 4 == 0, "rows that are no multiple of 4 bytes", one->code);
    check(total->rows == left->rows, "the total has other rows than the left tile", one->code);
    check(total->row_bytes == right->row_bytes, "the total is not as wide as the right tile", one->code);
    check(left->row_bytes / 4 == right->rows, "the left tile is not as wide as the right one is high", one->code);
    int wrong = fault_is("wrong");
    for (int row = 0; row < total->rows; row++)
        for (int column = 0; column < total->row_bytes / 4; column++) {
            int32_t sum;
            memcpy(&sum, &total->data[row][4 * column], 4);
            for (int byte = 0; byte < left->row_bytes; byte++)
                sum += value_of(left->data[row][byte], left_is_signed) *
                       value_of(right->data[byte / 4][4 * column + byte % 4], right_is_signed);
            sum += wrong;
            memcpy(&total->data[row][4 * column], &sum, 4);
        }
}

static void execute(const struct instruction *one) {
    int is_plain = one->vvvv == 0; /* stored inverted: no register */
    if (one->opcode == 0x49 && is_plain && one->prefix == 0 && one->is_memory && one->reg == 0) {
        load_config(one);
    } else if (one->opcode == 0x49 && is_plain && one->prefix == 0 && !one->is_memory && one->reg == 0 && one->rm == 0) {
        memset(tiles, 0, sizeof tiles);
        is_configured = 0;
    } else if (one->opcode == 0x49 && is_plain && one->prefix == 3 && !one->is_memory && one->rm == 0) {
        memset(used(one->reg, one)->data, 0, sizeof tiles[0].data);
    } else if (one->opcode == 0x4b && is_plain && one->prefix == 3 && one->has_sib) {
        load_tile(one);
    } else if (one->opcode == 0x4b && is_plain && one->prefix == 2 && one->has_sib) {
        store_tile(one);
    } else if (one->opcode == 0x5e && !one->is_memory) {
        add_product(one);
    } else {
        fail("an instruction that it does not know", one->code);
    }
}

static void on_illegal_instruction(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    struct instruction one = decode(code, registers);
    if (fault_is("illegal")) {
        signal(SIGILL, SIG_DFL);
        return;
    }
    while (fault_is("hang")) pause();
    execute(&one);
    registers[REG_RIP] += one.length;
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
    const char *wanted = getenv("AMX_EMULATOR_FAULT");
    if (wanted != NULL) fault = wanted;
}

/* Takes the place of the C library's: the request for tiles is answered here, all others there. */
long syscall(long number, ...) {
    static long (*next)(long, ...);
    long values[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) values[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == 158 && values[0] == 0x1023) {
        if (values[1] == 18 && !fault_is("refuse")) {
            is_permitted = 1;
            return 0;
        }
        errno = EINVAL;
        return -1;
    }
    if (next == NULL) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}
