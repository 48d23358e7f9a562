"""The program that carries one forwarded connection inside the guest, as an ELF file of a few hundred bytes.

A guest's images promise no program at all, so the shim brings its own: `relay` alone holds its container open (and
reaps), `relay PORT` connects to that port of the guest's loopback, IPv4 first, and copies both ways between the socket
and its standard streams. It exits with 0 when the socket's end has come, with connect's errno when nobody listens.

It is machine code for x86-64 Linux, assembled here: instructions in bytes, with the mnemonics a disassembler shows.
Source: AMD64 Architecture Programmer's Manual vol. 3; System V ABI, chapters on ELF and process start; syscall(2).
"""

import struct

_LOAD_ADDRESS = 0x400000
_HEADERS_BYTES = 64 + 2 * 56
_BUFFER_BYTES = 65536

# A line is: label, bytes, mnemonic. `>name` is the distance to a label, in four bytes.
_CODE = """
start       48 8b 04 24                     mov rax, [rsp]             ; argc
.           83 f8 02                        cmp eax, 2
.           0f 82 >hold                     jb hold
.           48 8b 74 24 10                  mov rsi, [rsp+16]          ; argv[1]
.           31 db                           xor ebx, ebx
digit       ac                              lodsb
.           84 c0                           test al, al
.           0f 84 >parsed                   jz parsed
.           2c 30                           sub al, '0'
.           0f b6 c0                        movzx eax, al
.           6b db 0a                        imul ebx, ebx, 10
.           01 c3                           add ebx, eax
.           e9 >digit                       jmp digit
parsed      86 df                           xchg bh, bl                ; network order
.           c1 e3 10                        shl ebx, 16
.           bf 02 00 00 00                  mov edi, AF_INET
.           e8 >socket                      call socket
.           48 b8 02 00 00 00 7f 00 00 01   mov rax, AF_INET, 127.0.0.1
.           48 09 d8                        or rax, rbx
.           6a 00                           push 0
.           50                              push rax
.           ba 10 00 00 00                  mov edx, 16
.           e8 >connect                     call connect
.           85 c0                           test eax, eax
.           0f 84 >connected                jz connected
.           44 89 e7                        mov edi, r12d
.           b8 03 00 00 00                  mov eax, SYS_close
.           0f 05                           syscall
.           bf 0a 00 00 00                  mov edi, AF_INET6
.           e8 >socket                      call socket
.           6a 00                           push 0                     ; scope
.           48 b8 00 00 00 00 00 00 00 01   mov rax, second half of ::1
.           50                              push rax
.           6a 00                           push 0                     ; first half
.           b8 0a 00 00 00                  mov eax, AF_INET6
.           09 d8                           or eax, ebx
.           50                              push rax
.           ba 1c 00 00 00                  mov edx, 28
.           e8 >connect                     call connect
.           85 c0                           test eax, eax
.           0f 84 >connected                jz connected
.           f7 d8                           neg eax
.           89 c7                           mov edi, eax
.           e9 >exit                        jmp exit
connected   48 81 ec @buffer                sub rsp, buffer
.           48 89 e5                        mov rbp, rsp
.           b8 39 00 00 00                  mov eax, SYS_fork
.           0f 05                           syscall
.           85 c0                           test eax, eax
.           0f 84 >sender                   jz sender
.           45 89 e6                        mov r14d, r12d
.           41 bf 01 00 00 00               mov r15d, 1
.           e8 >copy                        call copy
.           31 ff                           xor edi, edi
.           e9 >exit                        jmp exit
sender      bf 01 00 00 00                  mov edi, PR_SET_PDEATHSIG
.           be 09 00 00 00                  mov esi, SIGKILL
.           b8 9d 00 00 00                  mov eax, SYS_prctl
.           0f 05                           syscall
.           45 31 f6                        xor r14d, r14d
.           45 89 e7                        mov r15d, r12d
.           e8 >copy                        call copy
.           44 89 e7                        mov edi, r12d
.           be 01 00 00 00                  mov esi, SHUT_WR
.           b8 30 00 00 00                  mov eax, SYS_shutdown
.           0f 05                           syscall
.           31 ff                           xor edi, edi
exit        b8 e7 00 00 00                  mov eax, SYS_exit_group
.           0f 05                           syscall
socket      be 01 00 00 00                  mov esi, SOCK_STREAM
.           31 d2                           xor edx, edx
.           b8 29 00 00 00                  mov eax, SYS_socket
.           0f 05                           syscall
.           41 89 c4                        mov r12d, eax
.           c3                              ret
connect     48 8d 74 24 08                  lea rsi, [rsp+8]           ; what was pushed before the call
.           44 89 e7                        mov edi, r12d
.           b8 2a 00 00 00                  mov eax, SYS_connect
.           0f 05                           syscall
.           c3                              ret
copy        44 89 f7                        mov edi, r14d
.           48 89 ee                        mov rsi, rbp
.           ba @buffer                      mov edx, buffer
.           31 c0                           xor eax, eax               ; SYS_read
.           0f 05                           syscall
.           48 85 c0                        test rax, rax
.           0f 8e >copied                   jle copied
.           48 89 eb                        mov rbx, rbp
.           49 89 c1                        mov r9, rax
write       44 89 ff                        mov edi, r15d
.           48 89 de                        mov rsi, rbx
.           4c 89 ca                        mov rdx, r9
.           b8 01 00 00 00                  mov eax, SYS_write
.           0f 05                           syscall
.           48 85 c0                        test rax, rax
.           0f 8e >copied                   jle copied
.           48 01 c3                        add rbx, rax
.           49 29 c1                        sub r9, rax
.           0f 85 >write                    jnz write
.           e9 >copy                        jmp copy
copied      c3                              ret
hold        6a 00                           push 0
.           6a 00                           push 0
.           6a 00                           push 0
.           6a 01                           push SIG_IGN               ; struct sigaction: children are reaped
.           bf 11 00 00 00                  mov edi, SIGCHLD
.           48 89 e6                        mov rsi, rsp
.           31 d2                           xor edx, edx
.           41 ba 08 00 00 00               mov r10d, 8
.           b8 0d 00 00 00                  mov eax, SYS_rt_sigaction
.           0f 05                           syscall
held        b8 22 00 00 00                  mov eax, SYS_pause
.           0f 05                           syscall
.           e9 >held                        jmp held
"""


def relay_program() -> bytes:
    """The executable file, for x86-64."""
    code = _assembled(_CODE)
    entry = _LOAD_ADDRESS + _HEADERS_BYTES
    size = _HEADERS_BYTES + len(code)
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, 62, 1, entry, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, size, size, 0x1000)
    stack = struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # PT_GNU_STACK: not executable
    return header + load + stack + code


def _assembled(text: str) -> bytes:
    places: dict[str, int] = {}
    code = bytearray()
    jumps: list[tuple[int, str]] = []
    for line in text.strip().splitlines():
        label, _, rest = line.partition(" ")
        if label != ".":
            places[label] = len(code)
        # The mnemonic begins after a gap of at least two spaces.
        for word in rest.strip().partition("  ")[0].split():
            if word.startswith(">"):
                jumps.append((len(code), word[1:]))
                code += bytes(4)
            elif word == "@buffer":
                code += struct.pack("<I", _BUFFER_BYTES)
            else:
                code.append(int(word, 16))
    for place, name in jumps:
        struct.pack_into("<i", code, place, places[name] - place - 4)
    return bytes(code)
