# A bzImage that QEMU boots like Linux: two sectors of real-mode set-up code, which is all that ever runs, and an unused
# rest. The body follows this file, in the words defined here.
# Sources: the kernel's Documentation/arch/x86/boot.rst for the header; QEMU's docs/specs/pvpanic and the q35 chipset for
# the ports.

	.code16

	.macro halt
	cli
9:	hlt
	jmp	9b
	.endm

	.macro out_byte port value
	mov	$\port, %dx
	mov	$\value, %al
	out	%al, %dx
	.endm

	.macro reset				# by the keyboard controller's reset line
	out_byte 0x64 0xfe
	.endm

	.macro power_off			# ACPI S5 through q35's PM1 control port
	mov	$0x604, %dx
	mov	$0x2000, %ax
	out	%ax, %dx
	.endm

	.macro panic_event			# of the pvpanic device
	out_byte 0x505 1
	.endm

	.macro say value			# one byte on the first serial port
	out_byte 0x3f8 \value
	.endm

	.macro flood				# the serial port, for ever, without a newline
9:	say	'x'
	jmp	9b
	.endm

	.org	0x1f1
	.byte	1				# sectors of set-up code after the first
	.org	0x1fe
	.word	0xaa55
	jmp	body
	.org	0x202
	.ascii	"HdrS"
	.word	0x020c				# version of the protocol
	.org	0x211
	.byte	1				# loaded high
	.org	0x22c
	.long	0x37ffffff			# highest address of an initrd
	.org	0x280
body:
